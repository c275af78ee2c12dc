// CUDA: streams, scopes and the caching allocator's bytes as for any device
// (guard_runtime.h); page-locked bytes of exact sizes, copies and recycled
// events of its own.
//
// `gather` and `reduce` come from the high-priority pool, and so do the `wire`s
// that NCCL runs on (comm/wire.h): a collective's small kernels and the copies
// around it are not queued behind the user's.  `offload` and `reload`, one for
// each direction of the link, carry copies only.
//
// Thread-safe; scopes are per thread.
#pragma once

#include <c10/cuda/CUDAEvent.h>

#include <memory>

#include "device/guard_runtime.h"

namespace lowtide::device {

class CudaRuntime final : public GuardRuntime {
 public:
  // Without an index: the current device.
  explicit CudaRuntime(c10::Device device);

  // From cudaHostAlloc: torch's own pinned allocator rounds sizes up to powers
  // of two.
  c10::DataPtr allocate_pinned(std::size_t bytes) override;
  void copy(Stream stream, void* to, const void* from, std::size_t bytes,
            Copy direction) override;
  Event record(Stream stream) override;
  std::uint64_t capture() const override;
  Event record_time(Stream stream) override;
  void wait(Stream stream, const Event& event) override;

 private:
  c10::cuda::CUDAStream cuda_stream(Stream stream) const;

  // Shared with the events, which may outlive the runtime.
  std::shared_ptr<c10::cuda::CUDAEventPool> events_;
};

}  // namespace lowtide::device
