// The devices of the process: memory, addresses, streams, what is done.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <type_traits>
#include <vector>

#include "phantom/driver/address_space.h"
#include "phantom/driver/completion.h"
#include "phantom/driver/kept_bytes.h"
#include "phantom/driver/settings.h"

namespace lowtide::dry {

// Bytes taken, at most so many.  Thread-safe.
class Gauge {
 public:
  explicit Gauge(std::size_t most) : most_(most) {}

  // Before anything was taken.
  void allow(std::size_t most) { most_ = most; }
  bool take(std::size_t bytes);
  void give(std::size_t bytes);
  std::size_t most() const { return most_; }
  std::size_t now() const;
  std::size_t peak() const;

 private:
  std::size_t most_;
  mutable std::mutex mutex_;
  std::size_t now_ = 0;
  std::size_t peak_ = 0;
};

class Device {
 public:
  Device(int index, const Settings& settings)
      : memory(settings.limit),
        completion(settings.immediate),
        index_(index),
        addresses_(index) {}

  Gauge memory;
  Completion completion;

  // Memory with addresses; none when either is full.  Waits for nothing.
  std::optional<Address> allocate(std::size_t bytes);
  // As cudaFree: what lay there is forgotten, and the device has been waited
  // for.  False for an address that was not allocated.
  bool free(Address address);

  // Addresses alone.
  std::optional<Address> reserve(std::size_t bytes);
  bool release(Address address);
  std::optional<AddressSpace::Range> around(Address address) const;

 private:
  int index_;
  mutable std::mutex mutex_;
  AddressSpace addresses_;
};

int device_count();
Device& device(int index);

// The calling thread's.
int current_device();
bool set_current_device(int index);

// Streams are numbers in the order in which they were made: torch walks its
// blocks in that order.
inline constexpr int kLeastPriority = 0;
inline constexpr int kGreatestPriority = -5;
cudaStream_t make_stream(int device, int priority, unsigned flags);

struct Stream {
  int device = 0;
  int priority = 0;
  unsigned flags = 0;
};
// The default streams are the current device's.
Stream stream_of(cudaStream_t handle);
// The device that a stream works on.
Device& device_of_stream(cudaStream_t handle);

KeptBytes& kept();
Gauge& pinned();

// How often the host waited for a device.
std::atomic<std::int64_t>& host_waits();
// How many events were made.
std::atomic<std::int64_t>& events_made();

// Copies as far as there are bytes, of any two of host and devices.
void copy_bytes(void* to, const void* from, std::size_t bytes);

// The bits that the calling thread's reads of up to 8 bytes yield, instead of
// what is kept.
void set_answer(std::optional<std::int64_t> bits);

// Handles without meaning, never the same twice.
std::uintptr_t new_handle();
template <typename Handle>
void make_handle(Handle* handle) {
  if constexpr (std::is_integral_v<Handle>) {  // cuFFT's plans are numbers
    *handle = static_cast<Handle>(new_handle());
  } else {
    *handle = reinterpret_cast<Handle>(new_handle());
  }
}

}  // namespace lowtide::dry
