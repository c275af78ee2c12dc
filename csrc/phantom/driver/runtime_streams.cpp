// CUDA's runtime: streams and events.
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "phantom/driver/capture.h"
#include "phantom/driver/device.h"
#include "phantom/driver/listener.h"
#include "phantom/driver/order.h"
#include "phantom/driver/settings.h"
#include "phantom/driver/timekeeper.h"

namespace lowtide::dry {
namespace {

struct Event {
  int device = 0;
  Completion::Ticket ticket = {};
  Captured captured = {};
  Clock clock = {};
  Moment moment = {};
  std::atomic<bool> awaited = false;  // by a stream
  std::chrono::steady_clock::time_point recorded = {};
};

Event& event_of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

// [Note: Asking for a collective]
// Whoever waits for a collective of torch's nccl2 asks first whether it is
// done, and makes no stream wait for it if it is.  So while time is kept, an
// event right behind a collective is done when simulated time is there.  A
// thread that gives the device no work, such as that group's watchdog, asks
// when the wall's clock tells it to: there it is done when others have waited,
// or after a while: a program whose host never waits would be ended by the
// watchdog for a collective that the simulation is only slow to come to.
thread_local bool looks_on = true;

bool has_looked_on_for_long(const Event& event) {
  return looks_on && std::chrono::steady_clock::now() - event.recorded >
                         settings().patience;
}

bool is_done(const Event& event) {
  if (order().is_stuck(event.clock)) return false;
  if (has_looked_on_for_long(event)) return true;
  const auto& completion = device(event.device).completion;
  if (!completion.done(event.ticket)) return false;
  if (!event.moment.is_of_collective || !timekeeper().runs()) return true;
  if (event.awaited || completion.waited_for(event.ticket)) return true;
  return !looks_on && timekeeper().has_reached(event.moment);
}

}  // namespace
}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                         int priority) {
  *stream = make_stream(current_device(), priority, flags);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = stream_of(stream).flags;
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* index) {
  *index = stream_of(stream).device;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<std::uintptr_t>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++host_waits();
  if (const auto refused = capture().host_waits_for(stream)) return refused;
  wait_for_ever_if(order().is_stuck(stream));
  device_of_stream(stream).completion.wait_for_stream(stream);
  timekeeper().synchronize(stream);
  listener().hear_waited(stream_of(stream).device, stream);
  return cudaSuccess;
}
// Its work is done as soon as it is enqueued, so the host's turn is now.
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function,
                               void* data) {
  if (capture().id(stream) != 0) return capture().enqueue(stream);
  function(data);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                  cudaStreamCallback_t function, void* data,
                                  unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ++events_made();
  *event = reinterpret_cast<cudaEvent_t>(new Event{.device = current_device()});
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  looks_on = false;
  auto& recorded = event_of(event);
  recorded.device = stream_of(stream).device;
  recorded.captured = capture().record(stream);
  recorded.clock = order().record(stream);
  recorded.moment = timekeeper().record(stream);
  recorded.awaited = false;
  recorded.recorded = std::chrono::steady_clock::now();
  recorded.ticket = device(recorded.device).completion.record(stream);
  listener().hear_recorded(stream);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                     unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned) {
  auto& recorded = event_of(event);
  recorded.awaited = true;
  order().wait(stream, recorded.clock);
  if (const auto refused = capture().wait(stream, recorded.captured)) {
    return refused;
  }
  timekeeper().wait(stream, recorded.moment);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto& recorded = event_of(event);
  if (const auto refused = capture().ask(recorded.captured)) return refused;
  if (!is_done(recorded)) return cudaErrorNotReady;
  order().host_sees(recorded.clock);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++host_waits();
  const auto& recorded = event_of(event);
  if (const auto refused = capture().ask(recorded.captured)) return refused;
  wait_for_ever_if(order().is_stuck(recorded.clock));
  device(recorded.device).completion.wait(recorded.ticket);
  order().host_sees(recorded.clock);
  timekeeper().synchronize(recorded.moment);
  listener().hear_waited(recorded.device, recorded.ticket.stream);
  return cudaSuccess;
}
// A millisecond where no time is kept.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from,
                                 cudaEvent_t to) {
  constexpr double kMilliseconds = 1e3;
  const auto seconds =
      timekeeper().seconds_between(event_of(from).moment, event_of(to).moment);
  *milliseconds = seconds ? static_cast<float>(*seconds * kMilliseconds) : 1.0F;
  return cudaSuccess;
}
// An event of another process is an event of its own, which is complete.
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t) {
  *handle = {};
  return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t) {
  return cudaEventCreate(event);
}

}  // extern "C"
