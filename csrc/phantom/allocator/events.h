// When the work that uses a freed block on another stream is done.  The
// allocator asks for one event per recorded stream when such a block is freed
// and reuses the block once all of them are complete.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

namespace lowtide::phantom {

using StreamId = std::int64_t;  // 0 is the device's default stream
using EventId = std::uint64_t;

// Not thread-safe by itself: the allocator calls it under its own lock.
class EventSource {
 public:
  virtual ~EventSource() = default;

  // An event after everything issued to `stream` so far.
  virtual EventId record(StreamId stream) = 0;
  // True from the moment the host would see the event as complete.
  virtual bool done(EventId event) = 0;
  // The host blocks until the event is complete (out of memory, empty_cache).
  virtual void wait(EventId event) = 0;
  // The host waited for this stream, or with none for the whole device.
  virtual void synchronized(std::optional<StreamId> stream) = 0;
};

// The device is never behind: every event is complete when it is recorded.
// The lower bound of what is reserved.
std::unique_ptr<EventSource> immediate_events();

// The device is always behind: an event completes only when the host waits
// for it, its stream or the device.  The upper bound.
std::unique_ptr<EventSource> at_sync_events();

}  // namespace lowtide::phantom
