#include "phantom/device/pinned_memory.h"

#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <functional>
#include <map>
#include <mutex>

namespace lowtide::phantom {
namespace {

class Ranges {
 public:
  void add(const void* begin, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_[static_cast<const char*>(begin)] = bytes;
  }

  void remove(const void* begin) {
    const std::lock_guard lock(mutex_);
    ranges_.erase(static_cast<const char*>(begin));
  }

  bool contain(const void* data) {
    const auto* address = static_cast<const char*>(data);
    const std::lock_guard lock(mutex_);
    auto range = ranges_.upper_bound(address);
    if (range == ranges_.begin()) return false;
    --range;
    return std::less<>()(address, range->first + range->second);
  }

 private:
  std::mutex mutex_;
  std::map<const char*, std::size_t, std::less<>> ranges_;
};

Ranges& ranges() {
  // Tensors give back their memory until the process ends.
  static auto* ranges = std::make_unique<Ranges>().release();
  return *ranges;
}

void unpin(void* data) {
  ranges().remove(data);
  c10::free_cpu(data);
}

class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* const data = c10::alloc_cpu(bytes);
    ranges().add(data, bytes);
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

c10::Allocator& pinned_memory() {
  static Pinned pinned;
  return pinned;
}

bool is_pinned(const void* data) { return ranges().contain(data); }

}  // namespace lowtide::phantom
