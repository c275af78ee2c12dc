// The time that a simulated device keeps, while it was asked to.
//
// Everything the device does tells it: kernels and copies, events, waits of
// streams and of the host, collectives.  While no time is kept, that is one
// read of a flag.
//
// Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "phantom/time/timeline.h"

namespace lowtide::phantom {

// A moment of one of the timelines that there were.
struct TimeStamp {
  std::int64_t timeline = 0;
  Moment moment = 0;
};

class DeviceClock {
 public:
  // The timeline, locked; nothing while no time is kept.
  class Access {
   public:
    Access() = default;
    explicit operator bool() const { return timeline_ != nullptr; }
    Timeline* operator->() const { return timeline_; }

    TimeStamp stamp(Moment moment) const { return {number_, moment}; }
    // What happened on an earlier timeline is over, and was never waited for.
    void wait(TimedStream stream, const TimeStamp& stamp) const {
      if (stamp.timeline == number_) timeline_->wait(stream, stamp.moment);
    }
    void synchronize(const TimeStamp& stamp) const {
      if (stamp.timeline == number_) timeline_->synchronize(stamp.moment);
    }

   private:
    friend class DeviceClock;
    Access(std::unique_lock<std::mutex> lock, Timeline* timeline,
           std::int64_t number)
        : lock_(std::move(lock)), timeline_(timeline), number_(number) {}

    std::unique_lock<std::mutex> lock_;
    Timeline* timeline_ = nullptr;
    std::int64_t number_ = 0;
  };

  bool runs() const { return runs_.load(std::memory_order_relaxed); }
  Access timeline();

  // At time 0.  Throws lowtide::Error if it runs already.
  void start(Machine machine);
  // Gives away what was recorded.  Throws lowtide::Error if it does not run.
  std::unique_ptr<Timeline> stop();

  // A number that no other process group of this device has.
  std::int64_t number_of_group() { return num_groups_++; }

 private:
  std::atomic<bool> runs_ = false;
  std::atomic<std::int64_t> num_groups_ = 0;
  std::mutex mutex_;
  std::unique_ptr<Timeline> timeline_;
  std::int64_t number_ = 0;  // of the timeline
};

// Of the one device there is.
DeviceClock& device_clock();

// For kernels of this device's own: one on the current stream that reads or
// writes each of `tensors` once.  `flops` in the first one's dtype.
void time_kernel(std::string_view name,
                 std::initializer_list<at::Tensor> tensors, double flops = 0,
                 bool is_attention = false);
// A copy between host and device on the current stream.
void time_transfer(std::string_view name, std::size_t bytes);

}  // namespace lowtide::phantom
