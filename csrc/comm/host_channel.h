// Numbers of the host, compared over ranks beside the device's communicators:
// no stream waits for them, and none of them waits for a device.
//
// All ranks make the same calls in the same order.  Not thread-safe; callers
// release the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/borrowed_group.h"

namespace lowtide::comm {

class HostChannel {
 public:
  // Numbers on their way; each rank's keep their place.
  class Maximum {
   public:
    virtual ~Maximum() = default;
    // The greatest of all ranks' numbers, by place.  Blocks the host until
    // every rank has called `maximum`; throws lowtide::Error when a peer left.
    virtual std::vector<std::int64_t> wait() = 0;
  };

  virtual ~HostChannel() = default;
  // Null of one without a process group.
  virtual const BorrowedGroup* group() const { return nullptr; }
  virtual std::int64_t rank() const = 0;
  virtual std::int64_t size() const = 0;
  // As many numbers on every rank.  Does not block.
  virtual std::unique_ptr<Maximum> maximum(
      std::vector<std::int64_t> numbers) = 0;
  // Every rank's text, by rank.  Blocks.
  virtual std::vector<std::string> texts(const std::string& mine) = 0;
};

// Over the group's backend for CPU tensors, gloo's as a rule.  Not through the
// group itself, whose calls are what users count and trace.
std::shared_ptr<HostChannel> make_host_channel(
    std::shared_ptr<BorrowedGroup> group);

}  // namespace lowtide::comm
