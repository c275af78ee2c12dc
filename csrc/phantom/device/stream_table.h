// The streams of the simulated device: which exist, what waits for what, and
// how far each has come as the host sees it.
//
// Work runs the moment it is issued, so waiting never blocks; what is
// simulated is when the host would learn that it is done.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "phantom/allocator/events.h"
#include "phantom/device/options.h"

namespace lowtide::phantom {

inline constexpr StreamId kDefaultStream = 0;

// Streams a device has per priority, handed out in turn; as in CUDA, two
// requests may get the same one.
inline constexpr int kStreamsPerPriority = 32;

class StreamTable {
 public:
  // A moment in a stream's order, with what it waits for.
  using Clock = std::map<StreamId, std::uint64_t>;
  struct Point {
    StreamId stream = kDefaultStream;
    Clock clock;  // empty: done
  };

  explicit StreamTable(Progress progress) : progress_(progress) {}

  // A stream of the pool of its priority: urgent (negative) or normal.
  StreamId next_stream(int priority);

  // After everything issued to `stream` so far.
  Point record(StreamId stream);
  // What `stream` does from now on comes after `point`.
  void wait(StreamId stream, const Point& point);

  // Whether the host would see `point`, or all of `stream`, as done.
  bool done(const Point& point) const;
  bool done(StreamId stream) const;

  // The host waits; what the stream or point waited for is done as well.
  void synchronize(const Point& point);
  void synchronize(StreamId stream);
  void synchronize();

 private:
  void complete(const Clock& clock);

  const Progress progress_;
  mutable std::mutex mutex_;
  std::map<int, int> handed_out_;     // by priority
  std::map<StreamId, Clock> clocks_;  // of what was issued, by stream
  Clock done_;                        // as the host knows it
};

// Events for the allocator's deferred frees, on the same streams.
std::unique_ptr<EventSource> stream_events(StreamTable& table);

// The stream that is current on this thread; the default one on a new thread.
StreamId current_stream();
// Returns the previous one.
StreamId exchange_current_stream(StreamId stream);

}  // namespace lowtide::phantom
