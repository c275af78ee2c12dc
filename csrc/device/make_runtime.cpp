#include "device/make_runtime.h"

#include "base/check.h"
#include "device/cpu_runtime.h"

namespace lowtide::device {

std::shared_ptr<Runtime> make_runtime(c10::Device device) {
  if (device.is_cpu()) {
    return std::make_shared<CpuRuntime>();
  }
  throw InvalidArgument(base::error_text(
      "device", "cpu", device.str(),
      "Build lowtide with CUDA (LOWTIDE_CUDA=ON) to shard on a GPU."));
}

}  // namespace lowtide::device
