#include "phantom/device/device_allocator.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <cstring>
#include <exception>

#include "base/check.h"
#include "phantom/device/allocation_listener.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;

Address address_of(const void* data) { return reinterpret_cast<Address>(data); }

// Torch's memory profiler and lowtide's AllocationObserver listen here.
void report(PhantomDevice& device, void* data, std::int64_t bytes) {
  if (!c10::memoryProfilingEnabled()) return;
  c10::reportMemoryUsageToProfiler(data, bytes, device.memory().allocated(),
                                   device.memory().reserved(), kPhantomDevice);
}

// Runs wherever a tensor dies: logs, never throws.
void give_back(void* data) {
  try {
    PhantomDevice& device = phantom_device();
    const auto bytes =
        static_cast<std::int64_t>(device.memory().block_size(address_of(data)));
    device.memory().free(address_of(data));
    report(device, data, -bytes);
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: phantom: giving back " << data
               << " failed: " << error.what();
  }
}

c10::CachingAllocator::Stat stat(const Stat& from) {
  c10::CachingAllocator::Stat to;
  to.current = from.current;
  to.peak = from.peak;
  to.allocated = from.allocated;
  to.freed = from.freed;
  return to;
}

StatArray stats(const PoolStats& from) {
  using c10::CachingAllocator::StatType;
  StatArray to;
  to[static_cast<std::size_t>(StatType::AGGREGATE)] = stat(from[kAll]);
  to[static_cast<std::size_t>(StatType::SMALL_POOL)] = stat(from[kSmallPool]);
  to[static_cast<std::size_t>(StatType::LARGE_POOL)] = stat(from[kLargePool]);
  return to;
}

DeviceStats device_stats(const Statistics& from) {
  DeviceStats to;
  to.allocation = stats(from.allocation);
  to.segment = stats(from.segment);
  to.active = stats(from.active);
  to.inactive_split = stats(from.inactive_split);
  to.allocated_bytes = stats(from.allocated_bytes);
  to.reserved_bytes = stats(from.reserved_bytes);
  to.active_bytes = stats(from.active_bytes);
  to.inactive_split_bytes = stats(from.inactive_split_bytes);
  to.requested_bytes = stats(from.requested_bytes);
  to.oversize_allocations = stat(from.oversize_allocations);
  to.oversize_segments = stat(from.oversize_segments);
  to.num_alloc_retries = from.num_alloc_retries;
  to.num_ooms = from.num_ooms;
  to.num_sync_all_streams = from.num_sync_all_streams;
  to.num_device_alloc = from.num_device_alloc;
  to.num_device_free = from.num_device_free;
  to.max_split_size = from.max_split_size;
  return to;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, kPhantomDevice};
    PhantomDevice& device = phantom_device();
    const Address address = malloc(device, bytes);
    auto* const data = reinterpret_cast<void*>(address);
    c10::DataPtr owner(data, data, &give_back, kPhantomDevice);
    report(device, data,
           static_cast<std::int64_t>(device.memory().block_size(address)));
    tell_listener(address, bytes);
    return owner;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    if (phantom_device().exact()) std::memcpy(to, from, bytes);
  }

  bool initialized() override { return is_installed(); }

  void emptyCache(c10::MempoolId_t) override {
    phantom_device().memory().empty_cache();
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, stream);
  }

  DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return device_stats(phantom_device().memory().statistics());
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    phantom_device().memory().reset_accumulated_statistics();
  }

  void resetPeakStats(c10::DeviceIndex) override {
    phantom_device().memory().reset_peak_statistics();
  }

  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override {
    CachingAllocator& memory = phantom_device().memory();
    const auto capacity = memory.settings().capacity;
    if (!capacity) {
      throw Error(base::error_text("phantom", "a device with a capacity",
                                   "one without",
                                   "Pass install(capacity=...)."));
    }
    return {*capacity - memory.reserved(), *capacity};
  }

 private:
  static Address malloc(PhantomDevice& device, std::size_t bytes) {
    try {
      return device.memory().malloc(bytes, current_stream());
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static Allocator allocator;
  return allocator;
}

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get_deleter() != &give_back) return;
  phantom_device().memory().record_stream(address_of(data.get_context()),
                                          stream.id());
}

}  // namespace lowtide::phantom
