// Stream capture: which streams a capture has joined, and what CUDA refuses
// meanwhile.  Nothing is recorded in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <thread>

namespace lowtide::dry {

// What an event knows of the capture it was recorded in.
struct Captured {
  std::uint64_t capture = 0;                    // 0: in none
  std::map<cudaStream_t, std::uint64_t> clock;  // work it comes after
};

// One capture at a time.  Calls return what CUDA would.  Thread-safe.
class Capture {
 public:
  cudaError_t begin(cudaStream_t origin, cudaStreamCaptureMode mode);
  // All work of every stream that joined must have been joined back: a stream
  // that has only waited since leaves no node behind (CUDA Runtime API,
  // cudaStreamUpdateCaptureDependencies: nodes count, not streams).
  cudaError_t end(cudaStream_t origin);

  std::uint64_t id(cudaStream_t stream) const;  // 0: not captured

  // Work enqueued on `stream`.  On a stream outside the capture it is legal and
  // missing from the graph; it counts as stray.
  cudaError_t enqueue(cudaStream_t stream);
  Captured record(cudaStream_t stream) const;
  cudaError_t wait(cudaStream_t stream, const Captured& event);
  // The host asks for an event.
  cudaError_t ask(const Captured& event) const;
  // A call that the thread's capture mode may forbid, such as cudaMalloc.
  cudaError_t unsafe() const;
  cudaError_t host_waits() const;
  // For one stream.
  cudaError_t host_waits_for(cudaStream_t stream) const;

  std::int64_t stray() const;

 private:
  bool captures(cudaStream_t stream) const;

  mutable std::mutex mutex_;
  cudaStream_t origin_ = nullptr;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeGlobal;
  std::thread::id thread_;    // that began it
  std::uint64_t active_ = 0;  // id, 0: none
  std::uint64_t last_id_ = 0;
  std::uint64_t last_work_ = 0;
  std::map<cudaStream_t, std::map<cudaStream_t, std::uint64_t>> joined_;
  std::int64_t stray_ = 0;
};

Capture& capture();

// The calling thread's; returns the one before.
cudaStreamCaptureMode exchange_mode(cudaStreamCaptureMode mode);

}  // namespace lowtide::dry
