// Which unit to gather next.  Pure bookkeeping over unit numbers, the same on
// every rank as long as every rank runs its units in the same order.
//
// Forward: the order in which units were entered in the last complete forward;
// before there is one, the order of registration.  Backward: the reverse of
// the order in which units were left in the forward that is being
// differentiated, with multiplicity (a unit called twice is expected twice).
//
// A wrong guess costs an early gather, never a wrong result.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace lowtide::shard {

class Schedule {
 public:
  // Units are numbered 0 .. num_units - 1 in registration order.
  explicit Schedule(std::int32_t num_units);

  void begin_forward();
  // Units in the order they are entered; returns the unit expected next.
  std::optional<std::int32_t> enter_forward(std::int32_t unit);
  // `recorded`: autograd records this forward, a backward may follow.
  void leave_forward(std::int32_t unit, bool recorded);
  // Adopts what was entered since begin_forward as the expected order.
  void end_forward();

  // The unit expected after `unit` in backward.
  std::optional<std::int32_t> enter_backward(std::int32_t unit);
  void end_backward();

  // The units left since the last end_backward, reversed, each once, at the
  // place where its backward completes (its first call's).
  std::vector<std::int32_t> completion_order() const;

  void abort();  // forgets the unfinished forward and backward

 private:
  std::vector<std::int32_t> expected_;
  std::vector<std::int32_t> entered_;
  std::size_t cursor_ = 0;
  std::vector<std::int32_t> left_;
  std::vector<std::vector<std::size_t>>
      places_;  // unit -> open places in left_
};

}  // namespace lowtide::shard
