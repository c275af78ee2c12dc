#include <ATen/ceil_div.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "phantom/cuda_kernels/cub_storage.h"
#include "phantom/cuda_kernels/reduction.h"
#include "phantom/cuda_kernels/rules.h"

namespace lowtide::phantom {
namespace {

using at::ceil_div;

constexpr int kAllBits = 64;

int bits_of(std::int64_t largest) {
  int bits = 1;
  while (largest >>= 1) ++bits;
  return bits;
}

// When few rows are hit often, their sums are added up in place, in fp32.
bool adds_in_place(std::int64_t segments, std::int64_t partial,
                   std::int64_t columns) {
  constexpr std::int64_t kWarp = 32, kMaxBlock = 1024, kBlocksEach = 16;
  const std::int64_t padded = ceil_div(columns, kWarp) * kWarp;
  const std::int64_t grid =
      ceil_div(segments * padded, std::min(padded, kMaxBlock));
  return grid < kMultiprocessors * kBlocksEach && partial > grid * 4;
}

// The largest and the smallest index are compared with the bounds.
void check_bounds(const at::Tensor& index) {
  for (int bound = 0; bound < 2; ++bound) {
    const auto extremum = temporary(bytes_of(1, index.scalar_type()));
    {
      const auto buffers =
          reduction_buffers(index, {}, {c10::elementSize(index.scalar_type())});
      const auto partial_results = temporary(buffers.partial_results);
      const auto semaphores = temporary(buffers.semaphores);
    }
    const auto comparison = temporary(bytes_of(1, at::kBool));
  }
}

}  // namespace

// Up to 3072 indices one kernel adds the rows; more are sorted and summed in
// segments of 10, in fp32, for as many segments as there can be.
void embedding_backward(const CudaCall& call) {
  constexpr std::int64_t kFew = 3072, kRowsEach = 10;
  const at::Tensor& gradient = call.tensor("grad_output");
  const at::Tensor& indices = call.tensor("indices");
  const bool by_frequency = call["scale_grad_by_freq"].toBool();
  const std::int64_t count = indices.numel();
  const auto dense_gradient = temporary(bytes_to_be_contiguous(gradient));
  if (count == 0 || (count <= kFew && !by_frequency)) return call.outputs();

  const std::int64_t num_weights = call["num_weights"].toInt();
  const std::int64_t columns = gradient.size(-1);
  const auto dtype = indices.scalar_type();
  const auto sums_dtype = accumulator_of(gradient.scalar_type());
  const auto sorted = temporary(bytes_of(count, dtype));
  const auto origins = temporary(bytes_of(count, dtype));
  {
    const auto range = temporary(bytes_of(count, dtype));
    const auto sort = temporary(cub_sort_pairs_bytes(count, kAllBits));
  }
  const auto frequencies = temporary(by_frequency ? bytes_of(count, dtype) : 0);
  if (by_frequency) {
    for (int pass = 0; pass < 2; ++pass) {
      const auto scan = temporary(cub_scan_by_key_bytes(count));
    }
  }
  call.outputs();
  const auto segment_offsets = temporary(bytes_of(count, dtype));
  const auto num_segments = temporary(bytes_of(1, at::kLong));
  {
    const auto unique = temporary(bytes_of(count, dtype));
    const auto storage = temporary(cub_unique_by_key_bytes(count));
  }
  const std::int64_t segments = std::min(count, num_weights);
  const std::int64_t partial = count / kRowsEach + segments;
  const auto partials = temporary(bytes_of(segments, dtype));
  const auto partial_offsets = temporary(bytes_of(segments, dtype));
  { const auto scan = temporary(cub_exclusive_sum_bytes(segments)); }
  const auto num_partial = temporary(bytes_of(1, at::kLong));
  const auto offsets = temporary(bytes_of(partial, dtype));
  if (adds_in_place(segments, partial, columns)) {
    const auto segment_of = temporary(bytes_of(partial, dtype));
    const bool narrow = sums_dtype != gradient.scalar_type();
    const auto sums =
        temporary(narrow ? bytes_of(num_weights * columns, sums_dtype) : 0);
  } else {
    const auto sums = temporary(bytes_of(partial * columns, sums_dtype));
  }
}

// Accumulating sorts the linear indices, with their order, by as many bits as
// the largest has.
void index_put(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  call.outputs();
  if (!call["accumulate"].toBool()) return;
  const c10::IValue unsafe = call["unsafe"];
  const bool checked = unsafe.isNone() || !unsafe.toBool();
  std::int64_t count = 1, rows = 1, dim = 0;
  for (const auto& index : call["indices"].toOptionalTensorVector()) {
    if (index && index->defined()) {
      if (checked) check_bounds(*index);
      count = std::max(count, index->numel());
      rows *= self.size(dim);
    }
    ++dim;
  }
  const std::size_t bytes = bytes_of(count, at::kLong);
  const auto linear = temporary(bytes);
  { const auto wrapped = temporary(bytes); }
  const auto sorted = temporary(bytes);
  const auto origins = temporary(bytes);
  const auto range = temporary(bytes);
  const auto sort = temporary(cub_sort_pairs_bytes(count, bits_of(rows)));
}

// Of a vector, by CUB; along a dimension of a matrix there are no temporaries.
void cumulative_sum(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  call.outputs();
  const bool vector = self.dim() == 1;
  const auto scan =
      temporary(vector ? cub_exclusive_sum_bytes(self.numel()) : 0);
}

}  // namespace lowtide::phantom
