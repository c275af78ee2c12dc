#include "device/cuda/cuda_runtime.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

namespace lowtide::device {
namespace {

// What an Event points to.  `event` goes back to `pool` when it dies.
struct PooledPoint {
  std::shared_ptr<c10::cuda::CUDAEventPool> pool;
  c10::cuda::CUDAEventPool::Event event;
};

}  // namespace

CudaRuntime::CudaRuntime(c10::Device device)
    : GuardRuntime(device),
      events_(std::make_shared<c10::cuda::CUDAEventPool>()) {
  // A model that was on the meta device has not used CUDA yet.
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
}

c10::cuda::CUDAStream CudaRuntime::cuda_stream(Stream stream) const {
  return c10::cuda::CUDAStream(stream_of(stream));
}

c10::DataPtr CudaRuntime::allocate_pinned(std::size_t bytes) {
  const c10::cuda::CUDAGuard guard(device().index());
  // No work of a stream: a capture need not refuse it.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(
      cudaStreamCaptureModeRelaxed);
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, bytes, cudaHostAllocDefault);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // the caller falls back; the next call must not see it
    return {};
  }
  C10_CUDA_CHECK(error);
  return {data, data,
          [](void* begin) { C10_CUDA_CHECK_WARN(cudaFreeHost(begin)); },
          c10::Device(c10::DeviceType::CPU)};
}

void CudaRuntime::copy(Stream stream, void* to, const void* from,
                       std::size_t bytes, Copy direction) {
  const c10::cuda::CUDAGuard guard(device().index());
  C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes,
                                 direction == Copy::to_host
                                     ? cudaMemcpyDeviceToHost
                                     : cudaMemcpyHostToDevice,
                                 cuda_stream(stream)));
}

Event CudaRuntime::record(Stream stream) {
  const auto on = cuda_stream(stream);
  auto point = std::make_shared<PooledPoint>(
      PooledPoint{events_, events_->get(on.device_index())});
  point->event->record(on);
  return Event(std::move(point));
}

std::uint64_t CudaRuntime::capture() const {
  const auto compute = c10::cuda::getCurrentCUDAStream(device().index());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(compute, &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : std::uint64_t{id};
}

// A capture has no time.
Event CudaRuntime::record_time(Stream stream) {
  return capturing() ? Event() : GuardRuntime::record_time(stream);
}

void CudaRuntime::wait(Stream stream, const Event& event) {
  if (event.empty()) return;
  static_cast<PooledPoint*>(event.get())->event->block(cuda_stream(stream));
}

}  // namespace lowtide::device
