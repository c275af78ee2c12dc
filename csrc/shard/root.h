// What all units under one root module share: the order of their forwards and
// backwards, the gradient stream, and the beginning and end of every step.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/host_channel.h"
#include "memory/device_memory.h"
#include "shard/gradient_plans.h"
#include "shard/gradients/gradient_stream.h"
#include "shard/policy.h"
#include "shard/prefetch.h"
#include "shard/rank_comparison.h"
#include "shard/schedule.h"
#include "shard/step_log.h"
#include "shard/units.h"

namespace lowtide::shard {

class Root : public std::enable_shared_from_this<Root> {
 public:
  Root(std::string name, std::shared_ptr<memory::DeviceMemory> memory);

  // All units in registration order, once, before the first forward, and the
  // channel over all ranks that their meshes connect; null: ranks are not
  // compared.
  void adopt(const std::vector<std::shared_ptr<Unit>>& units,
             std::shared_ptr<comm::HostChannel> everyone = nullptr);
  // Called by a unit that dies.
  void forget(const Unit& unit);

  // See GradientPlans; takes effect when the next forward begins.  The same on
  // every rank.
  void set_gradient_budget(std::int64_t bytes) { plans_.set_budget(bytes); }
  std::int64_t gradient_budget() const { return plans_.budget(); }
  // Gradients of a unit that are fewer bytes wait for no wire
  // ([Note: A wire that is slower than backward]).
  void set_lingering_from(std::int64_t bytes) { lingering_from_ = bytes; }
  std::int64_t lingering_from() const { return lingering_from_; }

  // --- called by units ------------------------------------------------------
  // Returns the units to gather ahead.
  Units enter_forward(Unit& unit);
  void leave_forward(Unit& unit);
  // Whether the forward that runs began with this unit.
  bool forward_is_of(const Unit& unit) const { return forward_root_ == &unit; }
  // The inputs of that unit that require grad; see [Note: Detached forwards].
  void note_inputs(const std::vector<at::Tensor>& inputs);
  // Throws lowtide::Error if that forward began on another stream.
  void require_stream(const Unit& unit, const char* what) const;
  // What a unit that streams its rows calls instead, inside the forward or
  // after it, on the same stream; else throws lowtide::Error.
  void enter_rows(const Unit& unit, bool recorded);
  // The unit's plan must be made again, before its next backward.
  void replan(Unit& unit);
  // True while a forward runs that autograd records.
  bool recording() const { return forward_root_ != nullptr && recorded_; }

  // A backward is under way on this thread and has come to `unit`, to the
  // output of that call of it if it is one: opens it on first sight.
  void open_backward(const Unit& unit, std::int64_t call = Schedule::kNoCall);
  // Whether this thread runs a backward inside the one that was opened.
  bool nested_backward() const;
  // The backward that runs keeps its graph, or one since the last step has.
  bool keeps_graph() const {
    return graph_kept_ || kept_at_step_ == optimizer_steps_;
  }
  // The backward of a call of `unit` begins, before anything of it is issued;
  // returns the units to gather ahead, and the unit whose call that call was
  // in, or null.
  struct BackwardCall {
    Units next;
    Unit* around;
  };
  BackwardCall enter_backward(Unit& unit, std::int64_t call);
  // Those of `listed` that the backward which runs may come to; see [Note:
  // Detached forwards].
  Prefetch::Listed reached(const Prefetch::Listed& listed) const;
  GradientStream& stream() { return stream_; }
  StepLog& log() { return ranks_.log(); }
  const StepLog& log() const { return ranks_.log(); }

  // Reduces what backwards without sync have accumulated, outside of any
  // backward: `.grad` is set when it returns.
  void reduce_accumulated();

  // --- recovery -------------------------------------------------------------
  // Waits for what is in flight, frees every gathered parameter and buffer,
  // and, with `drop_gradients`, every gradient accumulated so far.  The next
  // step then runs as if the failed one had been skipped.
  void abort(bool drop_gradients = true);

  // An optimizer has changed shards: what is still gathered is old.
  // Throws lowtide::Error where a graph was replayed in which other ranks had
  // gradients than when it was captured.
  void optimizer_stepped();
  std::int64_t optimizer_steps() const { return optimizer_steps_; }

  // How many backwards, and reductions outside of any, have begun, and whether
  // the `number`th of them has come to its end.
  std::int64_t backwards() const { return backwards_; }
  bool ended(std::int64_t number) const;

  const Units& units() const { return units_; }
  // By number, those of the forward that runs or has run last.
  std::vector<std::int32_t> entered_units() const {
    return schedule_.entered();
  }

 private:
  void begin_forward(Unit& unit);
  void count_backward();
  void end_forward();
  void close_backward();
  void abort_here(bool drop_gradients);
  void require_agreement();
  // The forward that the backward of that call goes through alone on all ranks,
  // as far as is known.
  std::optional<std::size_t> detached_on_all(const Unit& unit,
                                             std::int64_t call) const;
  // Of a backward of that detached forward alone, or of all that are open.
  Units participants(std::optional<std::size_t> forward = {});
  void take_part(const Units& units);
  void join_others();
  Units living_of(const std::vector<std::int32_t>& numbers) const;
  bool all_run_in_order() const;

  std::string name_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  Units units_;
  Schedule schedule_{0};
  RankComparison ranks_;
  GradientPlans plans_;
  std::int64_t lingering_from_ = kLingeringBytes;
  GradientStream stream_;
  bool posted_backward_ = false;

  Unit* forward_root_ = nullptr;  // entered first in the running forward
  // Current when the last forward began; none before the first.
  std::optional<c10::Stream> forward_stream_;
  // The same of the last one that autograd recorded: that of gradient nodes.
  std::optional<c10::Stream> recorded_stream_;
  bool recorded_ = false;
  bool detached_ = false;
  std::int64_t forward_at_step_ = 0;
  std::int64_t optimizer_steps_ = 0;

  std::int64_t backwards_ = 0;
  std::int64_t ended_backward_ = 0;             // the last that has
  std::vector<std::int64_t> raised_backwards_;  // those that never will
  std::int64_t backward_ = -1;  // the graph task that was opened
  // The detached forward that it goes through alone, as far as is known.
  std::optional<std::size_t> backward_of_;
  bool graph_kept_ = false;  // by that task
  bool captured_ = false;    // a backward was, in a graph of the device's
  // When a backward last kept its graph, in optimizer steps.
  std::int64_t kept_at_step_ = -1;
  Units in_backward_;
  std::atomic<bool> failed_{false};
};

}  // namespace lowtide::shard
