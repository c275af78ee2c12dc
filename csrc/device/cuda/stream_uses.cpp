#include "device/cuda/stream_uses.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_compositeexplicitautograd_dispatch.h>
#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "base/host_uses.h"
#include "base/wrapped_bytes.h"

namespace lowtide::device {
namespace {

// Of bytes that are away, too.
const c10::DataPtr& bytes_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

// As torch's own, but for which bytes.  Those that are away need no keeping.
void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::cuda::CUDACachingAllocator::recordStream(base::innermost(bytes_of(self)),
                                                c10::cuda::CUDAStream(stream));
}

// torch's own, which is the same for all devices; then what it says to its
// allocator of page-locked bytes.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  at::compositeexplicitautograd::copy_(self, src, non_blocking);
  if (!non_blocking || self.is_cpu() == src.is_cpu()) return self;
  const at::Tensor& host = self.is_cpu() ? self : src;
  const at::Tensor& on_device = self.is_cpu() ? src : self;
  if (!host.has_storage()) return self;
  const auto device = on_device.device().index();
  base::note_use(bytes_of(host),
                 c10::cuda::getCurrentCUDAStream(device).unwrap());
  return self;
}

// torch warns of a kernel that takes the place of another one.
class Silence final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

torch::Library put_in_place() {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  torch::Library kernels(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                         __FILE__, __LINE__);
  kernels.impl("record_stream", &record_stream);
  kernels.impl("copy_", &copy_);
  return kernels;
}

}  // namespace

void note_stream_uses() {
  static const torch::Library kernels = put_in_place();
}

}  // namespace lowtide::device
