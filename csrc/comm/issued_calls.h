// The last collectives issued on one stream, for whoever asks which of them the
// device has not finished.
//
// A stream ends its work in the order in which it was given, so what a call
// behind has passed is finished.  The point behind a call is the one that its
// caller waits for: keeping calls records nothing more, and once all slots have
// been used nothing is allocated.  Thread-safe.
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/collectives.h"

namespace lowtide::comm {

class IssuedCalls {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Point = std::shared_ptr<c10::Event>;

  struct Unfinished {
    Kind kind = Kind::all_gather;
    std::string label;
    std::int64_t bytes = 0;  // of the larger side's buffers
    Time issued;
    std::uint64_t number = 0;  // of all that were issued, from 0 on
    std::size_t behind = 0;    // calls that were issued after it
    // Calls before it are not kept any more, and one of them may be the first.
    bool maybe_earlier = false;
  };

  // A host runs a thousand launches ahead of its device at most, and a step has
  // a few hundred collectives.
  static constexpr std::size_t kKept = 512;

  explicit IssuedCalls(c10::DeviceType device, std::size_t kept = kKept);

  // Keeps a call.  `record(event)` records the point behind it; what it throws
  // is passed on, and the call is not kept then.
  template <typename Record>
  Point add(Kind kind, const std::string& label, std::int64_t bytes, Time now,
            Record&& record) {
    const std::scoped_lock lock(mutex_);
    Slot& slot = next_slot();
    std::forward<Record>(record)(*slot.point);
    slot.kind = kind;
    slot.label.assign(label);
    slot.bytes = bytes;
    slot.issued = now;
    ++next_;
    return slot.point;
  }

  // When the oldest call was issued that is not known to be finished.
  std::optional<Time> oldest() const;
  // Forgets finished calls up to the first that is not.  `is_done` is asked for
  // points behind calls, oldest first; what it throws is passed on.
  std::optional<Unfinished> first_unfinished(
      const std::function<bool(const c10::Event&)>& is_done);

 private:
  struct Slot {
    Point point;
    Kind kind = Kind::all_gather;
    std::string label;
    std::int64_t bytes = 0;
    Time issued;
  };
  // With a point that nobody else holds.
  Slot& next_slot();
  const Slot& slot_of(std::uint64_t number) const {
    return slots_[number % slots_.size()];
  }

  const c10::DeviceType device_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::uint64_t first_ = 0;  // not known to be finished
  std::uint64_t next_ = 0;
  bool overtaken_ = false;  // calls were dropped without having been finished
};

}  // namespace lowtide::comm
