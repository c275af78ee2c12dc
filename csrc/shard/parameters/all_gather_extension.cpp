#include "shard/parameters/all_gather_extension.h"

#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "memory/flat_layout.h"

namespace lowtide::shard {
ExtendedParameters::ExtendedParameters(
    UnitName unit, std::int64_t world_size,
    std::shared_ptr<memory::DeviceMemory> memory)
    : unit_(std::move(unit)),
      world_size_(world_size),
      memory_(std::move(memory)),
      passing_(memory_->runtime().device()) {}

void ExtendedParameters::use(std::unique_ptr<AllGatherExtension> extension) {
  extension_ = std::move(extension);
}

void ExtendedParameters::prepare() {
  if (!any()) {
    return;
  }
  auto inputs = extension_->inputs();
  if (regions_.empty()) {
    lay_out(inputs);
  }
  LOWTIDE_INVARIANT(inputs.size() == regions_.size(),
                    "an extension sends the same tensors every time");
  inputs_.clear();
  for (const auto& input : inputs) {
    const auto bytes = static_cast<std::int64_t>(input.nbytes());
    LOWTIDE_INVARIANT(bytes * world_size_ == extents_[inputs_.size()].bytes,
                      "an extension sends as many bytes every time");
    inputs_.push_back(flat_view(
        input.storage(), at::kByte,
        input.storage_offset() * static_cast<std::int64_t>(input.itemsize()),
        bytes));
  }
}

void ExtendedParameters::lay_out(const std::vector<at::Tensor>& inputs) {
  auto passing = extension_->passing();
  passing.resize(inputs.size(), false);
  for (const auto& input : inputs) {
    const auto bytes = static_cast<std::int64_t>(input.nbytes()) * world_size_;
    const bool passes = passing[extents_.size()];
    auto& end = passes ? passing_bytes_ : bytes_;
    extents_.push_back({end, bytes, passes});
    end += at::round_up(bytes, memory::kAlignment);
    regions_.emplace_back(memory_->runtime().device());
    gathered_.push_back(regions_.back().view(
        input.scalar_type(), {input.numel() * world_size_}, {1}));
  }
}

void ExtendedParameters::set_read_errors() const {
  const auto error = read_error(*unit_, "a parameter made by an extension");
  for (const auto& region : regions_) {
    region.set_read_error(error);
  }
  for (const auto& inner : inner_) {
    set_read_error(inner.storage, error);
  }
}

void ExtendedParameters::bind_within(const RepointedStorage& owner,
                                     std::int64_t offset) {
  for (std::size_t k = 0; k < regions_.size(); ++k) {
    if (!extents_[k].passes) {
      regions_[k].bind_within(owner, offset + extents_[k].offset,
                              extents_[k].bytes);
    }
  }
}

void ExtendedParameters::own_passing(c10::DataPtr lease) {
  passing_.own(std::move(lease), passing_bytes_);
  for (std::size_t k = 0; k < regions_.size(); ++k) {
    if (extents_[k].passes) {
      regions_[k].bind_within(passing_, extents_[k].offset, extents_[k].bytes);
    }
  }
}

at::Tensor ExtendedParameters::passing(std::size_t k) const {
  return passing_.view(at::kByte, {extents_[k].bytes}, {1}, extents_[k].offset);
}

void ExtendedParameters::unbind_passing() {
  for (std::size_t k = 0; k < regions_.size(); ++k) {
    if (extents_[k].passes) regions_[k].unbind();
  }
  passing_.unbind();
}

std::vector<at::Tensor> ExtendedParameters::arrived(bool from_parts) {
  if (!any()) {
    return {};
  }
  bind_inner();
  auto made = extension_->arrived(gathered_, from_parts);
  if (!made.parameters.empty()) {
    keep_inner(made.inner);
  }
  unbind_passing();  // behind the kernels of the hook, which compute runs
  return std::move(made.parameters);
}

// The gathered tensors may be among them: their bytes go with the regions.
void ExtendedParameters::keep_inner(const std::vector<at::Tensor>& inner) {
  inner_.clear();
  for (const auto& tensor : inner) {
    if (!tensor.has_storage() || data_or_null(tensor.storage()) == nullptr) {
      continue;
    }
    const auto& storage = tensor.storage();
    const auto same = [&](const c10::Storage& other) {
      return other.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    };
    const bool known =
        std::any_of(gathered_.begin(), gathered_.end(),
                    [&](const auto& one) { return same(one.storage()); }) ||
        std::any_of(inner_.begin(), inner_.end(),
                    [&](const auto& one) { return same(one.storage); });
    if (!known) {
      inner_.push_back({storage, static_cast<std::int64_t>(storage.nbytes())});
    }
  }
  set_read_errors();
  bound_ = true;
}

void ExtendedParameters::bind_inner() {
  if (bound_) {
    return;
  }
  for (const auto& inner : inner_) {
    show_bytes(inner.storage,
               memory_->lease(memory::Category::gathered, *unit_, inner.bytes),
               inner.bytes);
  }
  bound_ = true;
}

void ExtendedParameters::unbind() {
  for (auto& region : regions_) {
    region.unbind();
  }
  passing_.unbind();
  for (const auto& inner : inner_) {
    hide_bytes(inner.storage);
  }
  bound_ = false;
}

}  // namespace lowtide::shard
