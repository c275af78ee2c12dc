#include "shard/storage.h"

#include <ATen/core/TensorBase.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>

#include <memory>

#include "base/check.h"

namespace lowtide::shard {
namespace {

at::Tensor tensor_on(const c10::Storage& storage, c10::Device device,
                     at::ScalarType dtype, at::IntArrayRef sizes,
                     at::IntArrayRef strides, std::int64_t offset) {
  const c10::InferenceMode normal(false);
  const auto key = c10::computeDispatchKey(dtype, c10::Layout::Strided, device);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

}  // namespace

RepointedStorage::RepointedStorage(c10::Device device)
    : storage_(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), c10::SymInt(0),
          c10::DataPtr(nullptr, device), nullptr, /*resizable=*/false)),
      device_(device) {}

void RepointedStorage::bind(void* data, std::int64_t bytes) {
  auto* impl = storage_.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(c10::DataPtr(data, device_));
  impl->set_nbytes(static_cast<std::size_t>(bytes));
}

void RepointedStorage::own(c10::DataPtr lease, std::int64_t bytes) {
  auto* impl = storage_.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(lease));
  impl->set_nbytes(static_cast<std::size_t>(bytes));
}

void RepointedStorage::unbind() { bind(nullptr, 0); }

at::Tensor RepointedStorage::view(at::ScalarType dtype, at::IntArrayRef sizes,
                                  at::IntArrayRef strides,
                                  std::int64_t offset) const {
  return tensor_on(storage_, device_, dtype, sizes, strides, offset);
}

std::int64_t RepointedStorage::use_count() const {
  return static_cast<std::int64_t>(storage_.use_count());
}

c10::Storage owning_storage(c10::DataPtr lease, std::int64_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(bytes), std::move(lease),
      nullptr, /*resizable=*/false));
}

c10::Storage sub_storage(const c10::Storage& owner, std::int64_t offset,
                         std::int64_t bytes) {
  auto* data = static_cast<char*>(owner.mutable_data()) + offset;
  auto keep_alive = std::make_unique<c10::Storage>(owner);
  c10::DataPtr pointer(
      data, keep_alive.release(),
      [](void* context) { delete static_cast<c10::Storage*>(context); },
      owner.device());
  return owning_storage(std::move(pointer), bytes);
}

at::Tensor strided_view(const at::Tensor& base, at::IntArrayRef sizes,
                        at::IntArrayRef strides, std::int64_t offset) {
  return tensor_on(base.storage(), base.device(), base.scalar_type(), sizes,
                   strides, offset);
}

at::Tensor flat_view(const c10::Storage& storage, at::ScalarType dtype,
                     std::int64_t byte_offset, std::int64_t numel) {
  const auto itemsize = static_cast<std::int64_t>(c10::elementSize(dtype));
  LOWTIDE_INVARIANT(byte_offset % itemsize == 0,
                    "a slice starts at a whole element");
  return tensor_on(storage, storage.device(), dtype, {numel}, {1},
                   byte_offset / itemsize);
}

}  // namespace lowtide::shard
