// A unit's gradients where they come in: from autograd, parameter by parameter,
// and from whoever writes `.grad` of full parameters by himself
// (written_gradients.h); and what waits here for a reduction, until somebody
// clears it (observed_gradient.h).
//
// Threads: one at a time; a ModuleView takes the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "shard/gradients/gradient_stream.h"
#include "shard/gradients/unit_gradients.h"
#include "shard/graph/observed_gradient.h"
#include "shard/graph/written_gradients.h"
#include "shard/parameter_info.h"
#include "shard/parameters/parameter_leaves.h"

namespace lowtide::shard {

class ArrivingGradients {
 public:
  // `leaves` and `gradients`, where they go, outlive it.
  ArrivingGradients(ParameterInfos infos, ParameterLeaves& leaves,
                    UnitGradients& gradients);

  // The leaves are others than before; only their shards are; there are none.
  // What was cleared until now is dropped first.
  void watch_leaves();
  void watch_shards();
  void unwatch_shards();

  // Parameter i takes part, and has not been frozen since its forward:
  // AccumulateGrad ignores it, too.
  bool wants(std::int32_t i) const;

  // In the following, `stream`: null in a backward without sync.
  //
  // Parameter i's gradient of this backward is complete, or part of it (`hold`)
  // if it is nested in another; undefined: none contributed.
  void deliver(GradientStream* stream, std::int32_t i, at::Tensor gradient,
               bool hold);
  // What others have written for parameters that are wanted.
  bool has_written() const;
  void deliver_written(GradientStream* stream, bool hold);
  // torch.autograd.grad has returned parameter i's gradient; outside of a
  // backward of the unit if `idle`.
  void on_returned(std::int32_t i, bool idle);
  // The unit's inputs are done in the backward on this thread.
  void on_inputs_done() { written_.inputs_done(); }

  // [Note: The dtype of a gradient]
  // Up to torch 2.14 a gradient comes in its parameter's dtype.  From 2.15 on
  // FSDP2 wants it in the one it is reduced in, where that is wider: a norm's
  // in fp32 is not rounded to bf16.  During the unit's backward, once something
  // is there to add to or it is to be reduced, nothing is cast at all, and what
  // several uses give is summed in the dtype they give it in.
  void expect_as_computed();
  void expect_as_reduced();

  // What waits for a reduction of i is dropped.
  void drop(std::int32_t i);
  // The same for all that was cleared since the last backward.
  void drop_cleared();
  // After what waits may have changed: looks whether it is cleared.
  void observe();
  // An optimizer in backward has taken all gradients there are, or not.
  void taken(bool taken);
  // Throws lowtide::Error if a split backward left gradients out for good.
  void require_split_backward_complete();

  // The step was aborted, with all gradients.
  void clear();

 private:
  void pass_on(GradientStream* stream, std::int32_t i, at::Tensor gradient,
               bool hold);
  at::Tensor rank_major(std::int32_t i, at::Tensor gradient) const;

  ParameterInfos infos_;
  ParameterLeaves& leaves_;
  UnitGradients& gradients_;
  WrittenGradients written_;
  std::vector<ObservedGradient> observed_;
  bool observes_ = false;
  bool taken_ = false;
};

}  // namespace lowtide::shard
