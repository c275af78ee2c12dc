#include "device/cuda/host_copies.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_compositeexplicitautograd_dispatch.h>
#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "base/host_uses.h"

namespace lowtide::device {
namespace {

// torch's own, which is the same for all devices; then what it says to its
// allocator of page-locked bytes.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  at::compositeexplicitautograd::copy_(self, src, non_blocking);
  if (!non_blocking || self.is_cpu() == src.is_cpu()) return self;
  const at::Tensor& host = self.is_cpu() ? self : src;
  const at::Tensor& on_device = self.is_cpu() ? src : self;
  if (!host.has_storage()) return self;
  base::note_use(
      host.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks(),
      c10::cuda::getCurrentCUDAStream(on_device.device().index()).unwrap());
  return self;
}

torch::Library put_copies_in_place() {
  torch::Library kernels(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                         __FILE__, __LINE__);
  kernels.impl("copy_", &copy_);
  return kernels;
}

}  // namespace

void note_copies_of_host_bytes() {
  static const torch::Library kernels = put_copies_in_place();
}

}  // namespace lowtide::device
