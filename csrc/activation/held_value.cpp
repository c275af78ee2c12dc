#include "activation/held_value.h"

#include <algorithm>
#include <utility>

#include "base/tensor_over.h"

namespace lowtide::activation {

HeldValue::HeldValue(const at::Tensor& tensor)
    : version_(tensor),
      requires_grad_(tensor.requires_grad()),
      dtype_(tensor.scalar_type()) {
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
  return base::tensor_over(stash_->on_device(), dtype_, geometry_.sizes,
                           geometry_.strides, geometry_.offset);
}

at::Tensor HeldValue::get() const {
  at::Tensor tensor = bare();
  if (requires_grad_) tensor.set_requires_grad(true);
  return tensor;
}

}  // namespace lowtide::activation
