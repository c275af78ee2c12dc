// Streams and events of any device torch has a guard for, memory from the
// allocator registered for it: devices that come to torch from outside, as
// PrivateUse1, and, with its own pinned memory and events, CUDA.
//
// `compute` is the stream that is current on this thread outside of any
// StreamScope.  `gather` and `reduce` are new streams of high priority,
// different from each other and from the default one, `offload` and `reload`
// of normal priority.  Page-locked bytes are the backend's own.  Nothing waits
// on the host except synchronize(), and bytes belong to compute: no block is
// ever marked as used on another stream.
//
// Thread-safe if the guard is; scopes are per thread.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device/runtime.h"

namespace lowtide::device {

class GuardRuntime : public Runtime {
 public:
  // Without an index: the current device.  Throws lowtide::Error if the
  // backend has no streams to spare, c10::Error if there is no backend.
  explicit GuardRuntime(c10::Device device);

  c10::Device device() const override { return gather_.device(); }
  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DataPtr allocate_pinned(std::size_t bytes) override;
  void copy(Stream stream, void* to, const void* from, std::size_t bytes,
            Copy direction) override;
  Event record(Stream stream) override;
  Event record_time(Stream stream) override;
  std::optional<std::int64_t> elapsed_ns(const Event& from,
                                         const Event& to) const override;
  void wait(Stream stream, const Event& event) override;
  void synchronize(Stream stream) override;
  std::int64_t enter(Stream stream) override;
  void leave(std::int64_t previous) override;
  Stream current() const override;

 protected:
  c10::Stream stream_of(Stream stream) const;

 private:
  const c10::impl::DeviceGuardImplInterface& guard_;  // registered: immortal
  c10::Stream gather_;
  c10::Stream reduce_;
  c10::Stream offload_;
  c10::Stream reload_;
};

}  // namespace lowtide::device
