#include "activation/held_value.h"

#include <algorithm>
#include <utility>

namespace lowtide::activation {

HeldValue::HeldValue(const at::Tensor& tensor)
    : version_(tensor),
      requires_grad_(tensor.requires_grad()),
      options_(tensor.options()) {
  if (tensor.has_storage()) storage_ = tensor.storage().getWeakStorageImpl();
}

bool HeldValue::shares_storage_with(const at::Tensor& tensor) const {
  return storage_ && tensor.has_storage() && !storage_->expired() &&
         storage_->_unsafe_get_target() ==
             tensor.storage().unsafeGetStorageImpl();
}

bool HeldValue::add_name(const std::string& name) {
  if (std::find(names_.begin(), names_.end(), name) != names_.end()) {
    return false;
  }
  names_.push_back(name);
  return true;
}

void HeldValue::keep(const at::Tensor& tensor) {
  packed_.reset();
  stash_.reset();
  kept_ = without_history(tensor);
}

void HeldValue::pack(const at::Tensor& tensor) {
  kept_.reset();
  stash_.reset();
  packed_.emplace(tensor, /*is_output=*/false);
}

void HeldValue::stash(std::shared_ptr<Stash> stash, const at::Tensor& tensor) {
  kept_.reset();
  packed_.reset();
  stash_ = std::move(stash);
  geometry_ = {tensor.sizes().vec(), tensor.strides().vec(),
               tensor.storage_offset()};
}

at::Tensor HeldValue::bare() const {
  if (kept_.defined()) return without_history(kept_);
  if (packed_) return without_history(packed_->unpack());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      stash_->on_device(),
      c10::DispatchKeySet(
          c10::computeDispatchKey(options_.dtype().toScalarType(),
                                  options_.layout(), options_.device())),
      options_.dtype());
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(geometry_.sizes, geometry_.strides,
                              geometry_.offset);
  return tensor;
}

at::Tensor HeldValue::get() const {
  at::Tensor tensor = bare();
  if (requires_grad_) tensor.set_requires_grad(true);
  return tensor;
}

}  // namespace lowtide::activation
