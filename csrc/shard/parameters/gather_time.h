// How long a unit's gather takes, by the device's clock.
//
// [Note: Measured gathers]
// When the next unit's gather leaves is decided by arithmetic with a fast
// machine's rates (policy.h).  Over PCIe, or with one GPU a node, a gather
// takes many times as long.  So gathers of a unit's forwards are timed, between
// two time stamps on `gather`'s stream, and the least time counts: the first
// gather makes connections, any may wait for a rank that is late.  That stream
// waits for what is timed, so the first two are, then one in eight.  Nothing
// blocks the host: a time is known once the device has come there, and is a
// decision's when all ranks know two of theirs (common_numbers.h).
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <utility>

#include "comm/collectives.h"
#include "device/runtime.h"

namespace lowtide::shard {

class GatherTime {
 public:
  // Gathers that are timed, and so many of them are enough to know; behind
  // those one in kApart.
  static constexpr std::int64_t kSamples = 8;
  static constexpr std::int64_t kEnough = 2;
  static constexpr std::int64_t kApart = 8;

  // Calls `issue`, which starts a gather, with `gather` the current stream.
  // While it is timed that stream, too, waits for the gather.  Nothing is timed
  // on a device without a clock and inside a graph capture.
  template <typename Issue>
  std::unique_ptr<comm::Pending> time(device::Runtime& runtime, Issue issue) {
    const auto number = gathers_++;
    if (timed_ == kSamples || (timed_ >= kEnough && number % kApart != 0)) {
      return issue();
    }
    auto from = runtime.record_time(device::Stream::gather);
    auto pending = issue();
    return from.empty() || pending == nullptr
               ? std::move(pending)
               : stamp(runtime, std::move(from), std::move(pending));
  }

  // Nanoseconds; 0: not known.
  std::int64_t least_ns(const device::Runtime& runtime);

 private:
  struct Sample {
    device::Event from;
    device::Event to;
  };

  std::unique_ptr<comm::Pending> stamp(device::Runtime& runtime,
                                       device::Event from,
                                       std::unique_ptr<comm::Pending> pending);

  std::int64_t gathers_ = 0;
  std::int64_t timed_ = 0;
  std::deque<Sample> samples_;  // that the device has not come to
  std::int64_t least_ns_ = std::numeric_limits<std::int64_t>::max();
};

}  // namespace lowtide::shard
