#include "device/captured_offset.h"

#ifdef LOWTIDE_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace lowtide::device {

#ifdef LOWTIDE_WITH_CUDA

std::optional<std::uint64_t> captured_offset(const at::Generator& generator) {
  if (!generator.device().is_cuda()) return std::nullopt;
  const c10::cuda::CUDAGuard guard(generator.device().index());
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() ==
      c10::cuda::CaptureStatus::None) {
    return std::nullopt;
  }
  auto* const random = at::check_generator<at::CUDAGeneratorImpl>(generator);
  return random->philox_cuda_state(/*increment=*/0).offset_intragraph_;
}

#else

std::optional<std::uint64_t> captured_offset(const at::Generator&) {
  return std::nullopt;
}

#endif

}  // namespace lowtide::device
