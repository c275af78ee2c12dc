// Live bytes over time, by category: every allocation torch makes for a thread
// and the threads that run its work, next to what lowtide's ledger holds.
//
// What is not lowtide's is activations, temporaries and the user's tensors; it
// counts from start(), so releases of what was allocated before do not show.
// lowtide's bytes are the ledger's, including those leased before.  A caching
// allocator reports the others rounded up to its blocks.
//
// [Note: Bounded timeline] A timeline keeps at most `capacity` samples.  When
// it is full, each two neighbours become the one with more bytes, and from then
// on twice as many events share a sample: the peak always stays exact.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/allocation_observer.h"
#include "memory/ledger.h"

namespace lowtide::memory {

class AllocationTimeline {
 public:
  struct Sample {
    std::int64_t event = 0;        // allocations and releases so far
    std::int64_t nanoseconds = 0;  // since start()
    std::int64_t total = 0;        // bytes live: lowtide's and all others
    Bytes lowtide = {};

    std::int64_t other() const;
  };

  // `ledger` may be null: then everything is `other`.  Throws
  // lowtide::InvalidArgument when `capacity` is below 4.
  AllocationTimeline(c10::DeviceType device_type,
                     std::shared_ptr<Ledger> ledger,
                     std::size_t capacity = 4096);
  ~AllocationTimeline();

  // Begins anew.  Throws lowtide::Error when it runs already, when a profiler
  // observes this thread, or when another timeline observes the ledger.
  void start();

  // On the thread that started it, otherwise throws lowtide::Error.  Does
  // nothing when it does not run.
  void stop();

  // While it runs and afterwards; oldest first, the moment of the peak and the
  // last event among them.
  std::vector<Sample> samples() const;
  Sample peak() const;

 private:
  class Recording;
  c10::DeviceType device_type_;
  std::shared_ptr<Ledger> ledger_;
  std::size_t capacity_;
  std::shared_ptr<Recording> recording_;
  std::unique_ptr<device::AllocationObserver> observer_;  // null: not running
};

}  // namespace lowtide::memory
