#include "device/cuda/record_stream.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "base/wrapped_bytes.h"

namespace lowtide::device {
namespace {

// As torch's own, but for which bytes.  Those that are away need no keeping.
void record_stream(at::Tensor& self, c10::Stream stream) {
  const auto& shown =
      self.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  c10::cuda::CUDACachingAllocator::recordStream(base::innermost(shown),
                                                c10::cuda::CUDAStream(stream));
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
  return kernels;
}

}  // namespace

void record_streams_of_wrapped_bytes() {
  static const torch::Library kernels = put_in_place();
}

}  // namespace lowtide::device
