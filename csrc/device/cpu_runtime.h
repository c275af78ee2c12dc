// A device without streams: work is done when its call returns, so events have
// always happened and waiting is free.  Bytes come from c10's CPU allocator,
// where torch's profilers see them.
#pragma once

#include "device/runtime.h"

namespace lowtide::device {

class CpuRuntime : public Runtime {
 public:
  c10::Device device() const override;
  c10::DataPtr allocate(std::size_t bytes) override;
  // Ordinary memory, from the system's allocator, where no observer of device
  // memory counts it.
  c10::DataPtr allocate_pinned(std::size_t bytes) override;
  void copy(Stream stream, void* to, const void* from, std::size_t bytes,
            Copy direction) override;
  Event record(Stream stream) override;
  void wait(Stream stream, const Event& event) override;
  void synchronize(Stream stream) override;

  // The current stream is per thread, common to all CPU runtimes.
  std::int64_t enter(Stream stream) override;
  void leave(std::int64_t previous) override;
  Stream current() const override;
};

}  // namespace lowtide::device
