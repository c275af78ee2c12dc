#include "phantom/device/storage.h"

#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "phantom/device/device_allocator.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {

c10::Storage make_storage(std::size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      device_allocator().allocate(bytes), &device_allocator(),
      /*resizable=*/true));
}

namespace {

at::Tensor with_geometry_of(const at::Tensor& like, at::Tensor tensor) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(),
                              like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return tensor;
}

}  // namespace

at::Tensor tensor_like(c10::Storage storage, c10::DispatchKey key,
                       const at::Tensor& like) {
  return with_geometry_of(
      like, at::detail::make_tensor<c10::TensorImpl>(
                std::move(storage), c10::DispatchKeySet(key), like.dtype()));
}

at::Tensor view_like(const at::Tensor& base, const at::Tensor& like) {
  return with_geometry_of(
      like, at::detail::make_tensor<c10::TensorImpl>(
                c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                base.key_set(), like.dtype()));
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (!is_phantom(tensor)) return tensor;
  auto owner = std::make_unique<c10::Storage>(tensor.storage());
  void* const data = owner->mutable_data();
  const std::size_t bytes = owner->nbytes();
  c10::DataPtr view(
      data, owner.release(),
      [](void* context) {
        const std::unique_ptr<c10::Storage> owned(
            static_cast<c10::Storage*>(context));
      },
      c10::Device(c10::kCPU));
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(view), nullptr,
      /*resizable=*/false));
  return tensor_like(std::move(storage), c10::DispatchKey::CPU, tensor);
}

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  c10::DataPtr data = device_allocator().allocate(bytes);
  const std::size_t kept = std::min(storage.nbytes(), bytes);
  if (kept > 0 && phantom_device().exact()) {
    std::memcpy(data.mutable_get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

}  // namespace lowtide::phantom
