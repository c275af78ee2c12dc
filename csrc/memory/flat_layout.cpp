#include "memory/flat_layout.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace lowtide::memory {
namespace {

std::string sizes_text(const std::vector<std::int64_t>& sizes) {
  std::string text = "[";
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += base::concat(i == 0 ? "" : ", ", sizes[i]);
  }
  return text + "]";
}

// Arithmetic on one parameter's sizes that refuses to wrap around.
class Checked {
 public:
  explicit Checked(const ParameterShape& parameter) : parameter_(parameter) {}

  std::int64_t multiply(std::int64_t a, std::int64_t b) const {
    std::int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) overflow();
    return product;
  }

  std::int64_t add(std::int64_t a, std::int64_t b) const {
    std::int64_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) overflow();
    return sum;
  }

  std::int64_t align_up(std::int64_t bytes, std::int64_t alignment) const {
    return add(bytes, alignment - 1) / alignment * alignment;
  }

 private:
  [[noreturn]] void overflow() const {
    throw InvalidArgument(base::error_text(
        parameter_.name, "a unit of at most 2^63 - 1 bytes over all ranks",
        base::concat("sizes ", sizes_text(parameter_.sizes)),
        "Split the unit, or correct the sizes."));
  }

  const ParameterShape& parameter_;
};

}  // namespace

std::int64_t ParameterSlice::local_rows(std::int64_t rank) const {
  return std::clamp<std::int64_t>(rows - rank * padded_rows, 0, padded_rows);
}

namespace {

ParameterSlice extent_of(const ParameterShape& parameter,
                         std::int64_t world_size) {
  if (parameter.sizes.empty()) {
    throw InvalidArgument(base::error_text(
        parameter.name, "a parameter with at least one dimension", "a scalar",
        "Give it the shape [1] to shard it."));
  }
  LOWTIDE_INVARIANT(std::all_of(parameter.sizes.begin(), parameter.sizes.end(),
                                [](std::int64_t size) { return size >= 0; }),
                    "sizes are not negative");
  const Checked checked(parameter);
  ParameterSlice slice;
  slice.rows = parameter.sizes[0];
  for (std::size_t dim = 1; dim < parameter.sizes.size(); ++dim) {
    slice.inner = checked.multiply(slice.inner, parameter.sizes[dim]);
  }
  slice.padded_rows =
      slice.rows / world_size + (slice.rows % world_size != 0 ? 1 : 0);
  slice.shard_numel = checked.multiply(slice.padded_rows, slice.inner);
  slice.shard_bytes =
      checked.multiply(slice.shard_numel, parameter.storage_itemsize);
  slice.input_bytes =
      checked.multiply(slice.shard_numel, parameter.compute_itemsize);
  slice.gathered_bytes = checked.multiply(slice.input_bytes, world_size);
  return slice;
}

}  // namespace

FlatLayout::FlatLayout(std::int64_t world_size,
                       const std::vector<ParameterShape>& parameters,
                       std::int64_t alignment)
    : world_size_(world_size), order_(parameters.size()) {
  LOWTIDE_INVARIANT(world_size > 0, "a mesh has ranks");
  LOWTIDE_INVARIANT(alignment > 0 && (alignment & (alignment - 1)) == 0,
                    "an alignment is a power of two");
  slices_.reserve(parameters.size());
  for (const ParameterShape& parameter : parameters) {
    slices_.push_back(extent_of(parameter, world_size));
  }
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  const auto unpacked =
      std::stable_partition(order_.begin(), order_.end(), [&](std::size_t i) {
        return parameters[i].may_pack && slices_[i].shard_numel > 0;
      });
  const auto num_packed = std::distance(order_.begin(), unpacked);
  if (world_size == 1 || num_packed < 2) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
  } else {
    std::for_each(order_.begin(), unpacked,
                  [&](std::size_t i) { slices_[i].packed = true; });
  }
  for (const std::size_t i : order_) {
    ParameterSlice& slice = slices_[i];
    const ParameterShape& parameter = parameters[i];
    const Checked checked(parameter);
    const auto place = [&](std::int64_t& total, std::int64_t bytes) {
      const std::int64_t offset = total;
      total = checked.add(total, bytes);
      return offset;
    };
    slice.apart = parameter.apart && !slice.packed && world_size > 1;
    if (!slice.apart) {
      slice.gathered_offset = place(
          gathered_bytes_, checked.align_up(slice.gathered_bytes, alignment));
    }
    const std::int64_t extent = checked.align_up(
        slice.shard_numel, slice.packed ? kPackedMultiple : alignment);
    // The first one behind the packed row is aligned like all others.
    if (!slice.packed && packed_row_bytes_ > 0) {
      shard_bytes_ = checked.align_up(shard_bytes_, alignment);
      input_bytes_ = checked.align_up(input_bytes_, alignment);
    }
    slice.shard_offset = place(
        shard_bytes_, checked.multiply(extent, parameter.storage_itemsize));
    slice.input_offset = place(
        input_bytes_, checked.multiply(extent, parameter.compute_itemsize));
    if (slice.packed) {
      packed_row_bytes_ = input_bytes_;
    }
  }
}

}  // namespace lowtide::memory
