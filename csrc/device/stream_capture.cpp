#include "device/stream_capture.h"

#ifdef LOWTIDE_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace lowtide::device {
namespace {

#ifdef LOWTIDE_WITH_CUDA
int exchange(int mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(mode);
  C10_CUDA_CHECK_WARN(cudaThreadExchangeStreamCaptureMode(&exchanged));
  return exchanged;
}
constexpr int kRelaxed = cudaStreamCaptureModeRelaxed;
#else
int exchange(int mode) { return mode; }
constexpr int kRelaxed = 0;
#endif

}  // namespace

bool is_capturing([[maybe_unused]] const c10::Stream& stream) {
#ifdef LOWTIDE_WITH_CUDA
  if (stream.device_type() == c10::DeviceType::CUDA) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(
        cudaStreamIsCapturing(c10::cuda::CUDAStream(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

AsksForEvents::AsksForEvents(c10::Device device)
    : device_(device), mode_(exchange(kRelaxed)) {}

AsksForEvents::~AsksForEvents() { exchange(mode_); }

}  // namespace lowtide::device
