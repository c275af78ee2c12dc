// Which unit to gather next.  Pure bookkeeping over unit numbers, the same on
// every rank as long as every rank runs its units in the same order.
//
// Forward: the order in which units were entered in the last complete forward
// that began with the same unit; before there is one, the order of
// registration.  Backward: the reverse of
// the order in which units were left in the forward that is being
// differentiated, with multiplicity (a unit called twice is expected twice).
//
// A wrong guess costs an early gather, never a wrong result.
//
// [Note: Units in units]
// Of a block whose experts are a unit of their own the experts run last, so
// their backward begins with that of the block: whoever expects a unit around
// others expects the first of those, too, and so on; but not of the outermost,
// which is gathered as long as any of them.
//
// [Note: The order of backward]
// The engine runs the ready node that was made last.  What uses a value is made
// after what makes it, so a graph's nodes run in exactly the reverse order of
// forward: when a call's backward begins, that of every call that forward made
// later is over, also where this rank left parameters of it unused.
//
// [Note: Detached forwards]
// A loss by chunks of tokens calls the head on each, detached from what made
// it, takes the gradient from there and differentiates the rest with all of
// them afterwards.  A forward that began with a unit inside the outermost one,
// on inputs that want a gradient and that no unit made, is such a forward: its
// backward is its own, and those of other forwards are still to come.  A
// backward that goes through others as well is told apart when it meets them.
// Inputs are each rank's own, so ranks compare, all that the root's meshes
// connect ([Note: Whose numbers decide]): where any of them calls the unit
// otherwise in a step, and where they are not compared, all take such a
// backward for one of everything.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace lowtide::shard {

class Schedule {
 public:
  // Units are numbered 0 .. num_units - 1 in registration order.
  explicit Schedule(std::int32_t num_units);

  void begin_forward();
  // Units in the order they are entered; returns those expected next: one, and
  // by [Note: Units in units] those inside it.
  std::vector<std::int32_t> enter_forward(std::int32_t unit);
  // `recorded`: autograd records this forward, a backward may follow.  `call`:
  // the number of the unit's call, by which its backward is told from those of
  // other forwards that are open; none for rows that are read outside of one.
  static constexpr std::int64_t kNoCall = 0;
  void leave_forward(std::int32_t unit, bool recorded,
                     std::int64_t call = kNoCall);
  // Adopts what was entered since begin_forward as the expected order.
  // `detached`: see [Note: Detached forwards].
  void end_forward(bool detached = false);

  // Units in the order they were entered since begin_forward.
  std::vector<std::int32_t> entered() const;

  // The backward of a call of `unit` begins: of that number, its last one that
  // is open.
  struct BackwardCall {
    std::vector<std::int32_t> next;    // those expected after it, as above
    std::optional<std::size_t> place;  // among the calls; none: not recorded
    bool earliest = false;  // no call of its backward was left before
    bool last = false;      // no recorded call of the unit is left
    bool alone = false;  // no other call was left between its begin and its end
    std::optional<std::int32_t> around;  // the unit whose call it is in
  };
  // `within`: the forward that the backward is known to go through alone.
  BackwardCall enter_backward(std::int32_t unit, std::int64_t call = kNoCall,
                              std::optional<std::size_t> within = {});
  // Whether autograd has run all of `unit` when the backward of the call at
  // `place` begins, by [Note: The order of backward].
  bool is_over(std::int32_t unit, std::size_t place) const;
  // The forwards that a backward came to since the last time wait for none any
  // more, whether or not this rank used all of their calls.
  void end_backward();
  // With recorded calls, that wait for theirs.
  std::size_t open_forwards() const;
  void forget_forwards();  // none of them is expected to come any more

  // The number of the detached forward that a call is in whose backward has not
  // begun; none: it is in another.
  std::optional<std::size_t> detached_of(std::int32_t unit,
                                         std::int64_t call) const;
  // The unit that a detached forward began with.
  std::int32_t first_of(std::size_t forward) const {
    return forwards_[forward].first;
  }

  // The units left in open forwards, or in that one, each once, in the order in
  // which their backwards complete: the reverse of that in which they were
  // first entered, so a unit around others comes behind them.
  std::vector<std::int32_t> completion_order(
      std::optional<std::size_t> forward = {}) const;

  void abort();  // forgets the unfinished forward and backward

 private:
  struct Call {
    std::int32_t unit;
    std::size_t depth;  // calls around it
  };
  std::vector<Call> registered_;
  std::map<std::int32_t, std::vector<Call>> expected_;  // by the first
  std::vector<Call> entered_;
  std::size_t cursor_ = 0;  // in what is expected
  std::size_t depth_ = 0;   // calls that are under way
  static constexpr std::int32_t kNobody = -1;
  struct Entered {
    std::size_t at;      // how many calls had been left then
    std::int64_t order;  // among all calls
  };
  struct Left {
    std::int32_t unit;
    Entered entered;
    std::int32_t around = kNobody;  // the unit whose call it is in
    std::size_t forward = 0;
  };
  struct Forward {  // with recorded calls
    bool open = true;
    bool detached = false;
    std::int32_t first = kNobody;  // of a detached one, which it began with
    bool entered = false;          // by the backward that runs
  };
  std::vector<Left> left_;
  std::vector<Forward> forwards_;
  bool begins_ = true;  // with the next recorded call another one
  bool is_open(const Left& call) const { return forwards_[call.forward].open; }
  std::int64_t calls_ = 0;  // that have been entered
  struct Open {
    std::int64_t call;
    std::size_t place;  // in left_
  };
  std::vector<std::vector<Open>> open_;  // by unit
  const Open* find_open(std::int32_t unit, std::int64_t call) const;
  // unit -> of its calls in open forwards the least Entered::at; kNever
  std::vector<std::size_t> first_entered_;
  // unit -> of its calls that are under way
  std::vector<std::vector<Entered>> under_way_;
  static constexpr std::size_t kNever = static_cast<std::size_t>(-1);
};

}  // namespace lowtide::shard
