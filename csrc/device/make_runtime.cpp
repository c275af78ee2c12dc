#include "device/make_runtime.h"

#include "base/check.h"
#include "device/cpu_runtime.h"
#ifdef LOWTIDE_WITH_CUDA
#include "device/cuda/cuda_runtime.h"
#endif

namespace lowtide::device {

std::shared_ptr<Runtime> make_runtime(c10::Device device) {
  if (device.is_cpu()) return std::make_shared<CpuRuntime>();
#ifdef LOWTIDE_WITH_CUDA
  if (device.is_cuda()) return std::make_shared<CudaRuntime>(device);
#else
  if (device.is_cuda()) {
    throw InvalidArgument(base::error_text(
        "device", "cpu (this build has no CUDA)", device.str(),
        "Build lowtide with LOWTIDE_CUDA=ON, or move the model to the CPU."));
  }
#endif
  throw InvalidArgument(base::error_text("device", "cpu or cuda", device.str(),
                                         "Move the model to one of these."));
}

}  // namespace lowtide::device
