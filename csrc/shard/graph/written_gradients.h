// Gradients that somebody else than autograd writes to the `.grad` of a unit's
// full parameters.
//
// [Note: Split backwards]
// A zero-bubble pipeline runs the backward of a stage's input apart from that
// of its weights: torch.autograd.grad gives it the weights' gradients, which it
// puts into the full parameters' `.grad` by itself.  AccumulateGrad would add
// the next one there, so what stands there belongs to the unit: it is taken
// before a gradient of autograd's own, and whenever a backward ends.
//
// Where a backward leaves out a parameter that it reaches, its gradient has to
// come later.  It never does if the pipeline was shown the shards, which no
// graph knows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "shard/graph/autograd_nodes.h"

namespace lowtide::shard {

class WrittenGradients {
 public:
  // The full parameters and their gradient nodes, which may be null.
  void watch(std::vector<at::Tensor> full, const std::vector<NodePtr>& nodes);

  // What has been written to parameter i's `.grad`, which is empty afterwards;
  // undefined: nothing.
  at::Tensor take(std::int32_t i);
  bool any(std::int32_t i) const;

  // The inputs of the unit are done in the backward on this thread: notes what
  // it has left out.
  void inputs_done();
  // torch.autograd.grad has returned parameter i's gradient.
  void returned(std::int32_t i);
  // A parameter whose gradient was left out more often than it was returned, or
  // -1; forgets all.
  std::int32_t take_missing();

  void clear();

 private:
  struct Parameter {
    at::Tensor full;
    const torch::autograd::Node* node;
    int missing = 0;  // backwards that left it out
  };
  std::vector<Parameter> parameters_;
};

}  // namespace lowtide::shard
