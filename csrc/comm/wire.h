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
// One for each communicator, from the device's pool.  What runs on it is
// watched (watch.h) until torch ends the group.  Not thread-safe.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "comm/borrowed_group.h"
#include "comm/collectives.h"
#include "comm/issued_calls.h"

namespace lowtide::comm {

class Wire {
 public:
  using Point = IssuedCalls::Point;

  // Of a communicator of `group`, on `device`, which has streams; without an
  // index: on the current one.
  Wire(std::shared_ptr<BorrowedGroup> group, c10::Device device);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // Runs `issue` with the wire as the current stream, behind what the stream
  // that is current now holds; returns the point after it.  When `issue`
  // throws, the current stream waits for what it has enqueued.  `bytes`: of the
  // larger side's buffers.
  template <typename Issue>
  [[nodiscard]] Point run(Kind kind, const std::string& label,
                          std::int64_t bytes, Issue&& issue) {
    follow_current();
    try {
      const c10::StreamGuard scope(stream_);
      std::forward<Issue>(issue)();
    } catch (...) {
      wait(point_behind(kind, label, bytes));
      throw;
    }
    return point_behind(kind, label, bytes);
  }
  // What is enqueued on the current stream from now on runs after `point`.
  void wait(const Point& point);

 private:
  class Watch;

  void follow_current();
  Point point_behind(Kind kind, const std::string& label, std::int64_t bytes);

  c10::Stream stream_;
  c10::Event before_;  // what the wire was last made to wait for
  std::shared_ptr<Watch> watch_;
};

}  // namespace lowtide::comm
