#include "phantom/driver/capture.h"

#include <algorithm>
#include <utility>

namespace lowtide::dry {
namespace {

using Lock = std::lock_guard<std::mutex>;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

}  // namespace

bool Capture::captures(cudaStream_t stream) const {
  return active_ != 0 && joined_.contains(stream);
}

cudaError_t Capture::begin(cudaStream_t origin, cudaStreamCaptureMode mode) {
  const Lock lock(mutex_);
  if (active_ != 0) return cudaErrorIllegalState;
  if (origin == nullptr) return cudaErrorStreamCaptureUnsupported;
  origin_ = origin;
  mode_ = mode;
  thread_ = std::this_thread::get_id();
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

std::uint64_t Capture::id(cudaStream_t stream) const {
  const Lock lock(mutex_);
  return captures(stream) ? active_ : 0;
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

Captured Capture::record(cudaStream_t stream) const {
  const Lock lock(mutex_);
  if (!captures(stream)) return {};
  return {active_, joined_.at(stream)};
}

cudaError_t Capture::wait(cudaStream_t stream, const Captured& event) {
  const Lock lock(mutex_);
  if (event.capture == 0) {
    return captures(stream) ? cudaErrorStreamCaptureIsolation : cudaSuccess;
  }
  if (event.capture != active_) return cudaErrorCapturedEvent;
  if (stream == nullptr) return cudaErrorStreamCaptureImplicit;
  auto& clock = joined_[stream];
  for (const auto& [other, work] : event.clock) {
    clock[other] = std::max(clock[other], work);
  }
  return cudaSuccess;
}

cudaError_t Capture::ask(const Captured& event) const {
  if (event.capture != 0) return cudaErrorCapturedEvent;
  return unsafe();
}

cudaError_t Capture::unsafe() const {
  const Lock lock(mutex_);
  if (active_ == 0 || thread_mode == cudaStreamCaptureModeRelaxed) {
    return cudaSuccess;
  }
  const bool own = thread_ == std::this_thread::get_id() &&
                   mode_ != cudaStreamCaptureModeRelaxed;
  const bool global = thread_mode == cudaStreamCaptureModeGlobal &&
                      mode_ == cudaStreamCaptureModeGlobal;
  return own || global ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t Capture::host_waits() const {
  const Lock lock(mutex_);
  return active_ != 0 ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t Capture::host_waits_for(cudaStream_t stream) const {
  return id(stream) != 0 ? cudaErrorStreamCaptureUnsupported : unsafe();
}

std::int64_t Capture::stray() const {
  const Lock lock(mutex_);
  return stray_;
}

Capture& capture() {
  static Capture capture;
  return capture;
}

cudaStreamCaptureMode exchange_mode(cudaStreamCaptureMode mode) {
  return std::exchange(thread_mode, mode);
}

}  // namespace lowtide::dry
