// Who hears of events and waits as they happen: csrc/phantom/observer.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace lowtide::dry {

struct Listener {
  // An event was recorded by the calling thread.
  using Recorded = void (*)(cudaStream_t);
  // The host waited for a stream, or for the whole device.
  using Waited = void (*)(int device, cudaStream_t, int whole_device);

  std::atomic<Recorded> recorded = nullptr;
  std::atomic<Waited> waited = nullptr;

  void hear_recorded(cudaStream_t stream) const {
    if (const auto heard = recorded.load()) heard(stream);
  }
  void hear_waited(int device, cudaStream_t stream) const {
    if (const auto heard = waited.load()) heard(device, stream, 0);
  }
  void hear_waited(int device) const {
    if (const auto heard = waited.load()) heard(device, nullptr, 1);
  }
};

inline Listener& listener() {
  static Listener listener;
  return listener;
}

}  // namespace lowtide::dry
