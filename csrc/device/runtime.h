// What the engine asks of a device: streams, events and bytes.
//
// The engine sees five in-order streams.  `compute` is whatever stream the
// user's own operators run on at that moment; `gather` and `reduce` carry
// the casts and copies before and after lowtide's communication; `offload` and
// `reload` copy to the host and back: activations, and of parameters there
// shards and gradients.  `wire` stands for the stream collectives run on, the
// process group's or ours (comm/wire.h); nothing else does.
//
// Memory always comes from the compute stream's pool, so what one unit frees
// serves the next activation.  Work on another stream that touches such bytes
// must be ordered by events after their allocation and before their release;
// `ScriptedRuntime` (tests) checks exactly that.  Host bytes for copies belong
// to no stream: whoever reuses them orders the uses.
//
// Implementations: CpuRuntime (everything is immediate), CudaRuntime (c10
// streams and events), ScriptedRuntime (vector clocks, deterministic race
// detection on a CPU).
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

namespace lowtide::device {

enum class Stream : std::uint8_t {
  compute,
  gather,
  reduce,
  wire,
  offload,
  reload,
};
inline constexpr std::size_t kNumStreams = 6;

enum class Access : std::uint8_t { read, write };

enum class Copy : std::uint8_t { to_host, to_device };

// A point in a stream's order.  Copyable; an empty event has always happened.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<void> point) : point_(std::move(point)) {}
  bool empty() const { return point_ == nullptr; }
  void* get() const { return point_.get(); }

 private:
  std::shared_ptr<void> point_;
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  virtual c10::Device device() const = 0;

  // Bytes from the compute stream's pool, at least 256-byte aligned on CUDA
  // and 64-byte aligned on a CPU; contents are undefined.  Destroying the
  // DataPtr gives the bytes back in the compute stream's order: the next
  // kernel enqueued on `compute` may overwrite them.  Compute may be another of
  // the user's streams by then, whose work so far their own one waits for.
  // Throws when there are none: c10::OutOfMemoryError on CUDA, c10::Error or
  // std::bad_alloc on a CPU.
  virtual c10::DataPtr allocate(std::size_t bytes) = 0;

  // Page-locked bytes of the host, exactly as many, for `copy`; null when the
  // system gives none.  Registration takes milliseconds: keep them.  Destroy
  // the DataPtr only after the copies that use it have run.
  virtual c10::DataPtr allocate_pinned(std::size_t bytes) = 0;

  // Copies between device and host on `stream`.  Does not block the host when
  // the host bytes are page-locked.
  virtual void copy(Stream stream, void* to, const void* from,
                    std::size_t bytes, Copy direction) = 0;

  // A point after everything enqueued on `stream` so far.
  virtual Event record(Stream stream) = 0;

  // The same with a time stamp, for `elapsed_ns` only; empty on devices without
  // a clock and inside a graph capture.
  virtual Event record_time(Stream /*stream*/) { return {}; }

  // Nanoseconds of the device from one time stamp to a later one; nothing while
  // the device has not come to both.
  virtual std::optional<std::int64_t> elapsed_ns(const Event& /*from*/,
                                                 const Event& /*to*/) const {
    return std::nullopt;
  }

  // Which graph capture records the work of the current stream; 0: none.  An
  // event of one capture can not be waited for in another, or in none.
  virtual std::uint64_t capture() const { return 0; }
  bool capturing() const { return capture() != 0; }

  // What is enqueued on `stream` from now on runs after `event`.  Never blocks
  // the host on a device with streams.
  virtual void wait(Stream stream, const Event& event) = 0;

  // The same behind everything enqueued so far on a stream of the user's.
  // False, and nothing is done, while a graph capture records either of them.
  virtual bool follow(Stream /*stream*/, c10::Stream /*users*/) { return true; }

  // Blocks the host until everything enqueued on `stream` has run.  Used to
  // recover from errors and to read values back, never in a steady step.
  virtual void synchronize(Stream stream) = 0;

  // Makes `stream` the current one for at:: operators and for c10d; returns
  // what `leave` needs to restore.  Use StreamScope, not these two.
  virtual std::int64_t enter(Stream stream) = 0;
  virtual void leave(std::int64_t previous) = 0;

  // Declares that work just enqueued on `stream` reads or writes
  // [begin, begin + bytes).  Free of cost outside tests.
  virtual void touches(Stream /*stream*/, const void* /*begin*/,
                       std::size_t /*bytes*/, Access /*access*/) {}

  // Says what the allocation at `begin` holds ("gathered", "layers.3"), for
  // messages of ScriptedRuntime.  Free of cost outside tests.
  virtual void describe(const void* /*begin*/, std::string_view /*kind*/,
                        std::string_view /*name*/) {}

  // The stream most recently entered on this thread (compute if none).
  virtual Stream current() const = 0;
};

// RAII for enter/leave; nests.
class StreamScope {
 public:
  StreamScope(Runtime& runtime, Stream stream)
      : runtime_(runtime), previous_(runtime.enter(stream)) {}
  ~StreamScope() { runtime_.leave(previous_); }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  Runtime& runtime_;
  std::int64_t previous_;
};

}  // namespace lowtide::device
