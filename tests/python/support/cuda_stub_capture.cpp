#include "cuda_stub_capture.h"

#include <algorithm>

namespace cuda_stub {
namespace {

using Lock = std::lock_guard<std::mutex>;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

}  // namespace

Capture& Capture::instance() {
  static Capture capture;
  return capture;
}

cudaError_t Capture::begin(cudaStream_t origin) {
  const Lock lock(mutex_);
  if (active_ != 0) return cudaErrorIllegalState;
  if (origin == nullptr) return cudaErrorStreamCaptureUnsupported;
  origin_ = origin;
  active_ = ++last_id_;
  joined_ = {{origin, {}}};
  return cudaSuccess;
}

cudaError_t Capture::end(cudaStream_t origin) {
  const Lock lock(mutex_);
  if (active_ == 0 || origin != origin_) return cudaErrorIllegalState;
  active_ = 0;
  for (const auto& [stream, clock] : joined_) {
    const auto own = clock.find(stream);
    if (own != clock.end() && joined_[origin][stream] < own->second) {
      return cudaErrorStreamCaptureUnjoined;
    }
  }
  return cudaSuccess;
}

bool Capture::has(cudaStream_t stream) { return id(stream) != 0; }

std::uint64_t Capture::id(cudaStream_t stream) {
  const Lock lock(mutex_);
  return active_ != 0 && joined_.contains(stream) ? active_ : 0;
}

cudaError_t Capture::enqueue(cudaStream_t stream) {
  const Lock lock(mutex_);
  if (active_ == 0) return cudaSuccess;
  if (const auto found = joined_.find(stream); found != joined_.end()) {
    found->second[stream] = ++last_work_;
  } else {
    ++stray_;
  }
  return cudaSuccess;
}

void Capture::record(Captured& event, cudaStream_t stream) {
  const Lock lock(mutex_);
  event = {};
  if (active_ == 0 || !joined_.contains(stream)) return;
  event = {active_, joined_[stream]};
}

cudaError_t Capture::wait(cudaStream_t stream, const Captured& event) {
  const Lock lock(mutex_);
  const bool captures = active_ != 0 && joined_.contains(stream);
  if (event.capture == 0) {
    return captures ? cudaErrorStreamCaptureIsolation : cudaSuccess;
  }
  if (event.capture != active_) return cudaErrorCapturedEvent;
  if (stream == nullptr) return cudaErrorStreamCaptureImplicit;
  auto& clock = joined_[stream];
  for (const auto& [other, work] : event.clock) {
    clock[other] = std::max(clock[other], work);
  }
  clock[stream] = ++last_work_;
  return cudaSuccess;
}

cudaError_t Capture::ask(const Captured& event) {
  if (event.capture != 0) return cudaErrorCapturedEvent;
  return unsafe();
}

cudaError_t Capture::unsafe() {
  const Lock lock(mutex_);
  const bool forbidden = active_ != 0 && mode == cudaStreamCaptureModeGlobal;
  return forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t Capture::host_waits() {
  const Lock lock(mutex_);
  return active_ != 0 ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

std::int64_t Capture::stray() {
  const Lock lock(mutex_);
  return stray_;
}

}  // namespace cuda_stub

using cuda_stub::Capture;

extern "C" {

// For programs that count it.
std::int64_t cuda_stub_stray() { return Capture::instance().stray(); }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* now) {
  std::swap(cuda_stub::mode, *now);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return Capture::instance().begin(stream);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(std::uintptr_t{32});
  return Capture::instance().end(stream);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                  cudaStreamCaptureStatus* now) {
  *now = Capture::instance().has(stream) ? cudaStreamCaptureStatusActive
                                         : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                     cudaStreamCaptureStatus* now,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes,
                                     const cudaGraphEdgeData** edges,
                                     std::size_t* count) {
  if (id) *id = Capture::instance().id(stream);
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(std::uintptr_t{32});
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, now);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*,
                              std::size_t* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t,
                                          unsigned long long) {
  *exec = reinterpret_cast<cudaGraphExec_t>(std::uintptr_t{48});
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

}  // extern "C"
