#include "phantom/device/host_call.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstring>

#include "phantom/device/phantom_device.h"
#include "phantom/device/storage.h"

namespace lowtide::phantom {
namespace {

using c10::DispatchKey;
using c10::StorageImpl;

void take_bytes(const StorageImpl& from, StorageImpl& to, bool exact) {
  const std::size_t bytes = std::min(from.nbytes(), to.nbytes());
  if (exact && bytes > 0) std::memcpy(to.mutable_data(), from.data(), bytes);
}

bool same_geometry(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset();
}

}  // namespace

HostCall::HostCall() : exact_(phantom_device().exact()) {}

c10::Storage HostCall::host_storage(const c10::Storage& phantom) {
  for (const StoragePair& pair : storages_) {
    if (pair.phantom.is_alias_of(phantom)) return pair.host;
  }
  auto* const impl = phantom.unsafeGetStorageImpl();
  const c10::Device device(exact_ ? c10::kCPU : c10::kMeta);
  // Resizable, so that out= kernels may; they get bytes of their own then.
  c10::Storage host(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), impl->nbytes(),
      c10::DataPtr(exact_ ? impl->mutable_data() : nullptr, device),
      c10::GetAllocator(device.type()), /*resizable=*/true));
  storages_.push_back({phantom, host});
  return host;
}

at::Tensor HostCall::host(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_phantom(tensor)) return tensor;
  for (const TensorPair& pair : tensors_) {
    if (pair.phantom.is_same(tensor)) return pair.host;
  }
  auto host =
      tensor_like(host_storage(tensor.storage()),
                  exact_ ? DispatchKey::CPU : DispatchKey::Meta, tensor);
  tensors_.push_back({tensor, host});
  return host;
}

at::Tensor HostCall::phantom(const at::Tensor& tensor) {
  if (!tensor.defined() || is_phantom(tensor)) return tensor;
  for (const TensorPair& pair : tensors_) {
    if (pair.host.is_same(tensor)) return pair.phantom;
  }
  for (const TensorPair& pair : tensors_) {
    if (pair.host.is_alias_of(tensor)) return view_like(pair.phantom, tensor);
  }
  for (const StoragePair& pair : storages_) {
    if (pair.host.is_alias_of(tensor.storage())) {
      return tensor_like(pair.phantom, DispatchKey::PrivateUse1, tensor);
    }
  }
  auto storage = make_storage(tensor.storage().nbytes());
  take_bytes(*tensor.storage().unsafeGetStorageImpl(),
             *storage.unsafeGetStorageImpl(), exact_);
  storages_.push_back({storage, tensor.storage()});
  return tensor_like(storage, DispatchKey::PrivateUse1, tensor);
}

void HostCall::update_arguments() {
  for (const StoragePair& pair : storages_) {
    const auto& host = *pair.host.unsafeGetStorageImpl();
    auto& phantom = *pair.phantom.unsafeGetStorageImpl();
    if (host.nbytes() == phantom.nbytes()) continue;
    resize_storage(phantom, host.nbytes());
    take_bytes(host, phantom, exact_);
  }
  for (const TensorPair& pair : tensors_) {
    if (same_geometry(pair.host, pair.phantom)) continue;
    pair.phantom.unsafeGetTensorImpl()->set_sizes_and_strides(
        pair.host.sizes(), pair.host.strides(), pair.host.storage_offset());
  }
}

}  // namespace lowtide::phantom
