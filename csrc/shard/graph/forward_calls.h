// Which calls of a unit's modules still wait for their backward: tells when the
// unit's part of a backward is over.
//
// Each call that autograd records has one identity node on its inputs, which
// runs when all of the call's gradients have been seen.  A unit's backward is
// over when no call is left whose node this backward reaches.  Where nothing
// tells (no input required grad, a backward through recorded gradients) only
// the end of the whole backward does.
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "shard/graph/held_graphs.h"

namespace lowtide::shard {

class ForwardCalls {
 public:
  // --- forward --------------------------------------------------------------
  // The unit's forward begins.
  void begin_forward() { recorded_ = false; }
  // A module of it is entered, with grad mode on or off; `inside_recorded`: in
  // a forward of the root that autograd records, where a call without grad is
  // recomputed in backward (re-entrant checkpoints).  Returns whether the
  // call's inputs are to be watched, where any requires grad.
  bool enter(bool grad_mode, bool inside_recorded);
  // `node`: that on the inputs of the call that was entered last.
  void watch(WeakNodePtr node);

  // --- backward -------------------------------------------------------------
  void begin_backward();
  // A gradient reached an output of that call of the unit; returns whether the
  // call's backward begins with it, which must not depend on the nodes on its
  // inputs: ranks differ in them.
  bool enter_backward(std::int64_t call);
  // Between a call's output gradient and its inputs'.
  bool inside_backward() const { return inside_backward_; }
  // The gradients of the inputs of `node`'s call are complete, in a backward
  // inside another one if `nested`.  Whether the unit's backward is over;
  // `reaches`: the backward on this thread runs that node.
  using Reaches = std::function<bool(const torch::autograd::Node* node)>;
  bool complete(const torch::autograd::Node* node, bool nested,
                const Reaches& reaches);
  // `more_backwards`: forwards from before this backward still wait for theirs.
  // `graph_kept`: another backward may go through its graph.
  // `optimizer_steps`: that have been taken.
  void end_backward(bool more_backwards, bool graph_kept,
                    std::int64_t optimizer_steps);

  // Whether a recorded call on this rank has no inputs that tell when its
  // backward is over; one of a graph that was kept counts until the optimizer
  // steps.  To be compared over ranks, which must seal the unit alike.
  bool has_calls_without_inputs(std::int64_t optimizer_steps) const {
    return without_inputs_ > 0 || kept_without_inputs_ == optimizer_steps;
  }
  void agree_on_calls_without_inputs(bool on_any) {
    without_inputs_on_any_ = on_any;
  }

  // The step was aborted.
  void clear();

  HeldGraphs& graphs() { return graphs_; }
  const HeldGraphs& graphs() const { return graphs_; }

 private:
  // Calls whose inputs' gradients have not been seen.
  std::vector<WeakNodePtr> open_;
  // Calls whose have been seen, in this backward and in earlier ones: those of
  // a graph that is retained come again.
  std::vector<WeakNodePtr> done_now_;
  std::vector<WeakNodePtr> done_before_;
  std::vector<std::int64_t> entered_;  // whose backward has begun
  bool inside_backward_ = false;
  // Calls that ran without grad inside a recorded forward, and nested backwards
  // of such.
  std::int64_t without_grad_ = 0;
  std::int64_t nested_calls_done_ = 0;
  // Recorded calls none of whose inputs required grad; whether any rank has
  // one; how many steps the optimizer had made when a backward kept one's
  // graph.
  std::int64_t without_inputs_ = 0;
  bool without_inputs_on_any_ = false;
  std::int64_t kept_without_inputs_ = -1;
  bool recorded_ = false;  // a module of the forward that runs
  HeldGraphs graphs_;
};

}  // namespace lowtide::shard
