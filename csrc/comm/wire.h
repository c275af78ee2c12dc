// A stream of high priority for collectives that run on the stream they are
// called from.
//
// [Note: The wire]
// Called with asyncOp, ProcessGroupNCCL runs on a stream of its own, of normal
// priority: its kernels queue behind the user's.  Called without, it runs on
// the current stream and gives no Work to wait for.  That stream is this one:
// on `gather` and `reduce` the copies for the next call would wait for the one
// before.
//
// One for each communicator, from the device's pool.  Not thread-safe.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <utility>
#include <vector>

namespace lowtide::comm {

class Wire {
 public:
  // Without an index: the current device, which has streams.
  explicit Wire(c10::Device device);

  // Runs `issue` with the wire as the current stream, behind what the stream
  // that is current now holds; returns the point after it.  When `issue`
  // throws, the current stream waits for what it has enqueued.
  template <typename Issue>
  [[nodiscard]] c10::Event run(Issue&& issue) {
    follow_current();
    try {
      const c10::StreamGuard scope(stream_);
      std::forward<Issue>(issue)();
    } catch (...) {
      wait(point_on(stream_));
      throw;
    }
    return point_on(stream_);
  }
  // What is enqueued on the current stream from now on runs after `point`.
  void wait(c10::Event point);

 private:
  void follow_current();
  c10::Event point_on(const c10::Stream& stream);

  c10::Stream stream_;
  std::vector<c10::Event> spare_;  // making one costs as much as recording it
};

}  // namespace lowtide::comm
