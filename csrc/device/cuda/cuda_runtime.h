// CUDA: c10's streams, the caching allocator's bytes, recycled events, and
// page-locked bytes of exact sizes.
//
// `compute` is the stream that is current on this thread outside of any
// StreamScope.  `gather` and `reduce` come from the high-priority pool, and so
// do the `wire`s that NCCL runs on (comm/wire.h): a collective's small kernels
// and the copies around it are not queued behind the user's.  `offload` and
// `reload`, of normal priority, one for each direction of the link, carry
// copies only.  Nothing waits on the host except synchronize(), and bytes
// belong to compute: no block is ever marked as used on another stream.
//
// Thread-safe; scopes are per thread.
#pragma once

#include <c10/cuda/CUDAEvent.h>

#include <memory>
#include <string>

#include "device/runtime.h"

namespace lowtide::device {

class CudaRuntime final : public Runtime {
 public:
  // Without an index: the current device.  `sysfs`: where the system says which
  // CPUs are near it.
  explicit CudaRuntime(c10::Device device, std::string sysfs = "/sys");

  c10::Device device() const override { return gather_.device(); }
  c10::DataPtr allocate(std::size_t bytes) override;
  // From cudaHostAlloc: torch's own pinned allocator rounds sizes up to powers
  // of two.  Near the device, [Note: Page-locked memory near the GPU].
  c10::DataPtr allocate_pinned(std::size_t bytes) override;
  void copy(Stream stream, void* to, const void* from, std::size_t bytes,
            Copy direction) override;
  Event record(Stream stream) override;
  Event record_time(Stream stream) override;
  std::optional<std::int64_t> elapsed_ns(const Event& from,
                                         const Event& to) const override;
  std::uint64_t capture() const override;
  void wait(Stream stream, const Event& event) override;
  bool follow(Stream stream, c10::Stream users) override;
  void synchronize(Stream stream) override;
  std::int64_t enter(Stream stream) override;
  void leave(std::int64_t previous) override;
  Stream current() const override;

 private:
  c10::cuda::CUDAStream cuda_stream(Stream stream) const;

  c10::cuda::CUDAStream gather_;
  c10::cuda::CUDAStream reduce_;
  c10::cuda::CUDAStream offload_;
  c10::cuda::CUDAStream reload_;
  // Shared with the events, which may outlive the runtime.
  std::shared_ptr<c10::cuda::CUDAEventPool> events_;
  const std::string sysfs_;
};

}  // namespace lowtide::device
