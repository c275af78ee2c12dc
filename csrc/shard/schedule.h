// Which unit to gather next.  Pure bookkeeping over unit numbers, the same on
// every rank as long as every rank runs its units in the same order.
//
// Forward: the order in which units were entered in the last complete forward;
// before there is one, the order of registration.  Backward: the reverse of
// the order in which units were left in the forward that is being
// differentiated, with multiplicity (a unit called twice is expected twice).
//
// A wrong guess costs an early gather, never a wrong result.
//
// [Note: The order of backward]
// The engine runs the ready node that was made last.  What uses a value is made
// after what makes it, so a graph's nodes run in exactly the reverse order of
// forward: when a call's backward begins, that of every call that forward made
// later is over, also where this rank left parameters of it unused.
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
  // `recorded`: autograd records this forward, a backward may follow.  `call`:
  // the number of the unit's call, by which its backward is told from those of
  // other forwards that are open; none for rows that are read outside of one.
  static constexpr std::int64_t kNoCall = 0;
  void leave_forward(std::int32_t unit, bool recorded,
                     std::int64_t call = kNoCall);
  // Adopts what was entered since begin_forward as the expected order.
  void end_forward();

  // Units in the order they were entered since begin_forward.
  const std::vector<std::int32_t>& entered() const { return entered_; }

  // The backward of a call of `unit` begins: of that number, its last one that
  // is open.
  struct BackwardCall {
    std::optional<std::int32_t> next;  // the unit expected after it
    std::optional<std::size_t> place;  // among the calls; none: not recorded
    bool last = false;                 // no recorded call of the unit is left
    bool alone = false;  // no other call was left between its begin and its end
  };
  BackwardCall enter_backward(std::int32_t unit, std::int64_t call = kNoCall);
  // Whether autograd has run all of `unit` when the backward of the call at
  // `place` begins, by [Note: The order of backward].
  bool is_over(std::int32_t unit, std::size_t place) const;
  void end_backward();

  // The units left since the last end_backward, reversed, each once, at the
  // place where its backward completes (its first call's).
  std::vector<std::int32_t> completion_order() const;

  void abort();  // forgets the unfinished forward and backward

 private:
  std::vector<std::int32_t> expected_;
  std::vector<std::int32_t> entered_;
  std::size_t cursor_ = 0;
  struct Left {
    std::int32_t unit;
    std::size_t entered_at;  // how many calls had been left then
  };
  std::vector<Left> left_;
  struct Open {
    std::int64_t call;
    std::size_t place;  // in left_
  };
  std::vector<std::vector<Open>> open_;  // by unit
  // unit -> of its recorded calls the least entered_at; kNever
  std::vector<std::size_t> first_entered_;
  // unit -> of its calls that are under way
  std::vector<std::vector<std::size_t>> under_way_;
  static constexpr std::size_t kNever = static_cast<std::size_t>(-1);
};

}  // namespace lowtide::shard
