#include "shard/all_gather_extension.h"

#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "memory/flat_layout.h"

namespace lowtide::shard {
namespace {

void show(const c10::Storage& storage, c10::DataPtr data, std::int64_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(static_cast<std::size_t>(bytes));
}

}  // namespace

ExtendedParameters::ExtendedParameters(
    UnitName unit, std::int64_t world_size,
    std::shared_ptr<memory::DeviceMemory> memory)
    : unit_(std::move(unit)),
      world_size_(world_size),
      memory_(std::move(memory)) {}

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
  for (const auto& input : inputs) {
    const auto bytes = static_cast<std::int64_t>(input.nbytes()) * world_size_;
    extents_.push_back({bytes_, bytes});
    bytes_ += at::round_up(bytes, memory::kAlignment);
    regions_.emplace_back(memory_->runtime().device());
    gathered_.push_back(regions_.back().view(
        input.scalar_type(), {input.numel() * world_size_}, {1}));
  }
}

void ExtendedParameters::bind(char* base) {
  for (std::size_t k = 0; k < regions_.size(); ++k) {
    regions_[k].bind(base + extents_[k].offset, extents_[k].bytes);
  }
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
  return std::move(made.parameters);
}

// The gathered tensors may be among them: their bytes go with the regions.
void ExtendedParameters::keep_inner(const std::vector<at::Tensor>& inner) {
  inner_.clear();
  for (const auto& tensor : inner) {
    if (!tensor.has_storage() || tensor.storage().data() == nullptr) {
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
  bound_ = true;
}

void ExtendedParameters::bind_inner() {
  if (bound_) {
    return;
  }
  for (const auto& inner : inner_) {
    show(inner.storage,
         memory_->lease(memory::Category::gathered, *unit_, inner.bytes),
         inner.bytes);
  }
  bound_ = true;
}

void ExtendedParameters::unbind() {
  for (auto& region : regions_) {
    region.unbind();
  }
  for (const auto& inner : inner_) {
    show(inner.storage, c10::DataPtr(nullptr, memory_->runtime().device()), 0);
  }
  bound_ = false;
}

}  // namespace lowtide::shard
