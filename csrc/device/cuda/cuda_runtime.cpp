#include "device/cuda/cuda_runtime.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Logging.h>

#include <cmath>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/wrapped_bytes.h"
#include "device/cuda/stream_uses.h"
#include "device/near_cpus.h"

namespace lowtide::device {
namespace {

using c10::cuda::CUDAEvent;
using c10::cuda::CUDAEventPool;
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;
using c10::cuda::getStreamFromPool;

constexpr int kHighPriority = -1;
constexpr int kNormalPriority = 0;

// The scopes this thread is in, outermost first; of all runtimes, because two
// roots on one device share the user's stream.
struct Scope {
  Stream entered;
  CUDAStream previous;
};
thread_local std::vector<Scope> scopes;

// `event` goes back to `pool` when the last copy of an Event dies.
struct Pooled {
  std::shared_ptr<CUDAEventPool> pool;
  CUDAEventPool::Event event;
};

Event recorded(std::shared_ptr<CUDAEvent> event, const CUDAStream& on) {
  event->record(on);
  return Event(std::move(event));
}

CUDAEvent& event_of(const Event& event) {
  return *static_cast<CUDAEvent*>(event.get());
}

// What was current before this thread's outermost scope on the device.
CUDAStream compute_stream(c10::Device device) {
  for (const Scope& scope : scopes) {
    if (scope.previous.device() == device) return scope.previous;
  }
  return getCurrentCUDAStream(device.index());
}

// 0: none.
std::uint64_t capture_of(const CUDAStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : std::uint64_t{id};
}

// What the DataPtr of `allocate` owns.
struct Block {
  c10::DataPtr bytes;
  CUDAStream home;  // whose pool they come from
  std::shared_ptr<CUDAEventPool> events;
};

// [Note: The home of bytes]
// The allocator gives bytes back to the pool of the stream that they were asked
// for on, whatever stream is current when they die: backward() may be called on
// another than forward, and a step may follow one that raised on another.
void come_home(const Block& block) {
  const CUDAStream now = compute_stream(block.home.device());
  // No event leads into a capture or out of one.
  if (now == block.home || capture_of(now) != capture_of(block.home)) return;
  auto last_use = block.events->get(now.device_index());
  last_use->record(now);
  last_use->block(block.home);
}

void give_back(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  try {
    come_home(*block);
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: bytes of " << block->home
               << " are not ordered behind their last use: " << error.what();
  }
}

const base::Wrapping kBlocks(&give_back, [](void* block) {
  return &static_cast<Block*>(block)->bytes;
});

std::string pci_address(c10::Device device) {
  char text[] = "00000000:00:00.0";
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(text, sizeof(text), device.index()));
  return text;
}

}  // namespace

CudaRuntime::CudaRuntime(c10::Device device, std::string sysfs)
    : gather_(getStreamFromPool(kHighPriority, device.index())),
      reduce_(getStreamFromPool(kHighPriority, gather_.device_index())),
      offload_(getStreamFromPool(kNormalPriority, gather_.device_index())),
      reload_(getStreamFromPool(kNormalPriority, gather_.device_index())),
      events_(std::make_shared<CUDAEventPool>()),
      sysfs_(std::move(sysfs)) {
  // A model that was on the meta device has not used CUDA yet.
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  note_stream_uses();
}

CUDAStream CudaRuntime::cuda_stream(Stream stream) const {
  if (stream == Stream::gather) return gather_;
  if (stream == Stream::reduce) return reduce_;
  if (stream == Stream::offload) return offload_;
  if (stream == Stream::reload) return reload_;
  LOWTIDE_INVARIANT(stream == Stream::compute,
                    "only a process group runs on the wire stream");
  return compute_stream(device());
}

c10::DataPtr CudaRuntime::allocate(std::size_t bytes) {
  const c10::cuda::CUDAStreamGuard guard(cuda_stream(Stream::compute));
  auto block = std::make_unique<Block>(
      Block{c10::cuda::CUDACachingAllocator::get()->allocate(bytes),
            guard.current_stream(), events_});
  void* const data = block->bytes.get();
  return {data, block.release(), &give_back, device()};
}

c10::DataPtr CudaRuntime::allocate_pinned(std::size_t bytes) {
  const c10::cuda::CUDAGuard guard(device().index());
  // No work of a stream: a capture need not refuse it.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(
      cudaStreamCaptureModeRelaxed);
  const OnCpus near(cpus_near(pci_address(device()), sysfs_));
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
  const CUDAStream on = cuda_stream(stream);
  const auto pooled = std::make_shared<Pooled>(
      Pooled{events_, events_->get(on.device_index())});
  return recorded({pooled, pooled->event.get()}, on);
}

// A capture has no time, and the pool's events tell none.
Event CudaRuntime::record_time(Stream stream) {
  if (capturing()) return {};
  return recorded(std::make_shared<CUDAEvent>(cudaEventDefault),
                  cuda_stream(stream));
}

std::optional<std::int64_t> CudaRuntime::elapsed_ns(const Event& from,
                                                    const Event& to) const {
  constexpr double kNsOfMs = 1e6;
  const CUDAEvent& first = event_of(from);
  const CUDAEvent& second = event_of(to);
  if (!first.query() || !second.query()) return std::nullopt;
  return std::llround(first.elapsed_time(second) * kNsOfMs);
}

std::uint64_t CudaRuntime::capture() const {
  return capture_of(getCurrentCUDAStream(device().index()));
}

void CudaRuntime::wait(Stream stream, const Event& event) {
  if (!event.empty()) event_of(event).block(cuda_stream(stream));
}

bool CudaRuntime::follow(Stream stream, c10::Stream users) {
  const CUDAStream ahead(users);
  const CUDAStream behind = cuda_stream(stream);
  if (capture_of(ahead) != 0 || capture_of(behind) != 0) return false;
  auto last = events_->get(ahead.device_index());
  last->record(ahead);
  last->block(behind);
  return true;
}

void CudaRuntime::synchronize(Stream stream) {
  cuda_stream(stream).synchronize();
}

std::int64_t CudaRuntime::enter(Stream stream) {
  const CUDAStream target = cuda_stream(stream);
  const auto depth = static_cast<std::int64_t>(scopes.size());
  scopes.push_back({stream, getCurrentCUDAStream(target.device_index())});
  setCurrentCUDAStream(target);
  return depth;
}

void CudaRuntime::leave(std::int64_t previous) {
  while (static_cast<std::int64_t>(scopes.size()) > previous) {
    setCurrentCUDAStream(scopes.back().previous);
    scopes.pop_back();
  }
}

Stream CudaRuntime::current() const {
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
    if (scope->previous.device() == device()) return scope->entered;
  }
  return Stream::compute;
}

}  // namespace lowtide::device
