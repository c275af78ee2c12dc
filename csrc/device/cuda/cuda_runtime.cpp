#include "device/cuda/cuda_runtime.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <cmath>
#include <vector>

#include "base/check.h"

namespace lowtide::device {
namespace {

using c10::cuda::CUDAStream;

// The scopes this thread is in, outermost first; of all runtimes, because two
// roots on one device share the user's stream.
struct Scope {
  Stream entered;
  CUDAStream previous;
};
thread_local std::vector<Scope> scopes;

// What an Event points to.  `event` goes back to `pool` when it dies.
struct Point {
  std::shared_ptr<c10::cuda::CUDAEventPool> pool;
  c10::cuda::CUDAEventPool::Event event;
};

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : c10::cuda::current_device();
}

}  // namespace

CudaRuntime::CudaRuntime(c10::Device device)
    : gather_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true,
                                           index_of(device))),
      reduce_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true,
                                           gather_.device_index())),
      offload_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false,
                                            gather_.device_index())),
      reload_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false,
                                           gather_.device_index())),
      events_(std::make_shared<c10::cuda::CUDAEventPool>()) {}

CUDAStream CudaRuntime::stream_of(Stream stream) const {
  if (stream == Stream::gather) return gather_;
  if (stream == Stream::reduce) return reduce_;
  if (stream == Stream::offload) return offload_;
  if (stream == Stream::reload) return reload_;
  LOWTIDE_INVARIANT(stream == Stream::compute,
                    "only a process group runs on the wire stream");
  // What was current before this thread's outermost scope on this device.
  for (const Scope& scope : scopes) {
    if (scope.previous.device_index() == gather_.device_index()) {
      return scope.previous;
    }
  }
  return c10::cuda::getCurrentCUDAStream(gather_.device_index());
}

c10::DataPtr CudaRuntime::allocate(std::size_t bytes) {
  const c10::cuda::CUDAStreamGuard guard(stream_of(Stream::compute));
  return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
}

c10::DataPtr CudaRuntime::allocate_pinned(std::size_t bytes) {
  const c10::cuda::CUDAGuard guard(gather_.device_index());
  void* data = nullptr;
  if (cudaHostAlloc(&data, bytes, cudaHostAllocDefault) != cudaSuccess) {
    cudaGetLastError();  // the caller falls back; the next call must not see it
    return {};
  }
  return {data, data, [](void* begin) { cudaFreeHost(begin); },
          c10::Device(c10::DeviceType::CPU)};
}

void CudaRuntime::copy(Stream stream, void* to, const void* from,
                       std::size_t bytes, Copy direction) {
  const c10::cuda::CUDAGuard guard(gather_.device_index());
  C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes,
                                 direction == Copy::to_host
                                     ? cudaMemcpyDeviceToHost
                                     : cudaMemcpyHostToDevice,
                                 stream_of(stream)));
}

Event CudaRuntime::record(Stream stream) {
  const CUDAStream on = stream_of(stream);
  auto point =
      std::make_shared<Point>(Point{events_, events_->get(on.device_index())});
  point->event->record(on);
  return Event(std::move(point));
}

Event CudaRuntime::record_time(Stream stream) {
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() !=
      c10::cuda::CaptureStatus::None) {
    return {};
  }
  // The pool's events are without time.
  auto event = std::make_shared<c10::cuda::CUDAEvent>(cudaEventDefault);
  event->record(stream_of(stream));
  return Event(std::move(event));
}

std::optional<std::int64_t> CudaRuntime::elapsed_ns(const Event& from,
                                                    const Event& to) const {
  const auto& first = *static_cast<c10::cuda::CUDAEvent*>(from.get());
  const auto& second = *static_cast<c10::cuda::CUDAEvent*>(to.get());
  if (!first.query() || !second.query()) return std::nullopt;
  return std::llround(static_cast<double>(first.elapsed_time(second)) * 1e6);
}

void CudaRuntime::wait(Stream stream, const Event& event) {
  if (event.empty()) return;
  static_cast<Point*>(event.get())->event->block(stream_of(stream));
}

void CudaRuntime::synchronize(Stream stream) {
  stream_of(stream).synchronize();
}

std::int64_t CudaRuntime::enter(Stream stream) {
  const CUDAStream target = stream_of(stream);
  const auto depth = static_cast<std::int64_t>(scopes.size());
  scopes.push_back(
      {stream, c10::cuda::getCurrentCUDAStream(target.device_index())});
  c10::cuda::setCurrentCUDAStream(target);
  return depth;
}

void CudaRuntime::leave(std::int64_t previous) {
  while (static_cast<std::int64_t>(scopes.size()) > previous) {
    c10::cuda::setCurrentCUDAStream(scopes.back().previous);
    scopes.pop_back();
  }
}

Stream CudaRuntime::current() const {
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
    if (scope->previous.device_index() == gather_.device_index()) {
      return scope->entered;
    }
  }
  return Stream::compute;
}

}  // namespace lowtide::device
