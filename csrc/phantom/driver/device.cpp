#include "phantom/driver/device.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>

#include "phantom/driver/listener.h"
#include "phantom/driver/pinned_memory.h"
#include "phantom/driver/timekeeper.h"

namespace lowtide::dry {
namespace {

using Lock = std::lock_guard<std::mutex>;

thread_local int thread_device = 0;
thread_local std::optional<std::int64_t> thread_answer;

// The smallest handle of a stream that was made; those below are CUDA's names
// for default streams.
constexpr std::uintptr_t kFirstStream = 4096;

struct Streams {
  std::mutex mutex;
  std::deque<Stream> all;
};

Streams& streams() {
  static Streams streams;
  return streams;
}

}  // namespace

bool Gauge::take(std::size_t bytes) {
  const Lock lock(mutex_);
  if (bytes > most_ - now_) return false;
  now_ += bytes;
  peak_ = std::max(peak_, now_);
  return true;
}

void Gauge::give(std::size_t bytes) {
  const Lock lock(mutex_);
  now_ -= bytes;
}

std::size_t Gauge::now() const {
  const Lock lock(mutex_);
  return now_;
}

std::size_t Gauge::peak() const {
  const Lock lock(mutex_);
  return peak_;
}

std::optional<Address> Device::allocate(std::size_t bytes) {
  if (!memory.take(bytes)) return std::nullopt;
  const auto address = reserve(bytes);
  if (!address) memory.give(bytes);
  return address;
}

bool Device::free(Address address) {
  std::optional<std::size_t> bytes;
  {
    const Lock lock(mutex_);
    bytes = addresses_.forget(address);
  }
  if (!bytes) return false;
  kept().forget(address, *bytes);
  memory.give(*bytes);
  completion.wait_for_device();
  timekeeper().synchronize_all();
  listener().hear_waited(index_);
  return true;
}

std::optional<Address> Device::reserve(std::size_t bytes) {
  const Lock lock(mutex_);
  return addresses_.place(bytes);
}

bool Device::release(Address address) {
  const Lock lock(mutex_);
  const auto bytes = addresses_.forget(address);
  if (bytes) kept().forget(address, *bytes);
  return bytes.has_value();
}

std::optional<AddressSpace::Range> Device::around(Address address) const {
  const Lock lock(mutex_);
  return addresses_.around(address);
}

int device_count() { return settings().devices; }

Device& device(int index) {
  static const auto devices = [] {
    std::vector<std::unique_ptr<Device>> all;
    for (int i = 0; i < device_count(); ++i) {
      all.push_back(std::make_unique<Device>(i, settings()));
    }
    return all;
  }();
  return *devices.at(static_cast<std::size_t>(index));
}

int current_device() { return thread_device; }

bool set_current_device(int index) {
  if (index < 0 || index >= device_count()) return false;
  thread_device = index;
  return true;
}

cudaStream_t make_stream(int device, int priority, unsigned flags) {
  auto& [mutex, all] = streams();
  const Lock lock(mutex);
  const int granted = std::clamp(priority, kGreatestPriority, kLeastPriority);
  all.push_back({device, granted, flags});
  const auto made =
      reinterpret_cast<cudaStream_t>(kFirstStream + 16 * all.size());
  timekeeper().prioritize(made, granted);
  return made;
}

Stream stream_of(cudaStream_t handle) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number < kFirstStream) return {current_device(), 0, 0};
  auto& [mutex, all] = streams();
  const Lock lock(mutex);
  return all.at((number - kFirstStream) / 16 - 1);
}

Device& device_of_stream(cudaStream_t handle) {
  return device(stream_of(handle).device);
}

KeptBytes& kept() {
  static KeptBytes kept;
  return kept;
}

Gauge& pinned() {
  static Gauge pinned(std::numeric_limits<std::size_t>::max());
  return pinned;
}

std::atomic<std::int64_t>& host_waits() {
  static std::atomic<std::int64_t> waits = 0;
  return waits;
}

std::atomic<std::int64_t>& events_made() {
  static std::atomic<std::int64_t> made = 0;
  return made;
}

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  const auto to_address = reinterpret_cast<Address>(to);
  const auto from_address = reinterpret_cast<Address>(from);
  if (device_of(to)) {
    if (device_of(from)) {
      kept().copy(to_address, from_address, bytes);
    } else {
      kept().write(to_address, from, bytes);
    }
  } else if (device_of(from)) {
    pinned_memory().clear(to, bytes);
    kept().read(to, from_address, bytes);
    if (thread_answer && bytes <= sizeof *thread_answer) {
      std::memcpy(to, &*thread_answer, bytes);
    }
  } else {
    std::memmove(to, from, bytes);
  }
}

void set_answer(std::optional<std::int64_t> bits) { thread_answer = bits; }

std::uintptr_t new_handle() {
  constexpr std::uintptr_t kAlignment = 64;
  static std::atomic<std::uintptr_t> last = kAlignment;
  return last += kAlignment;
}

}  // namespace lowtide::dry
