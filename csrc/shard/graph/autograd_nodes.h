// lowtide's own nodes in the autograd graph.  They hold their receiver weakly:
// a graph may outlive the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/torch_version.h"

namespace lowtide::shard {

using base::NodePtr;
using base::WeakNodePtr;

// Why autograd has to see a gradient that could be summed in place.
enum class Obstacle : std::uint8_t {
  none,
  unwanted,   // the backward has other inputs
  hooks,      // of the user's, on the parameter or on its node
  asked_for,  // torch.autograd.grad returns it
  recorded,   // create_graph
  elsewhere,  // on another stream than the parameter's node runs on
};

// What a unit learns from the graph.  Called on autograd's threads without the
// GIL; nothing here may be called after the receiver is gone.
class BackwardReceiver {
 public:
  virtual ~BackwardReceiver() = default;
  // What linear_node.h computes: part of parameter i's gradient is
  // grad_output^T input, matrices of equal numbers of rows.  True: it has been
  // added where the gradient is summed, and on_parameter_gradient follows
  // without it.  `obstacle`: it must not be.
  virtual bool on_product(std::int32_t /*i*/, const at::Tensor& /*grad_output*/,
                          const at::Tensor& /*input*/, Obstacle /*obstacle*/) {
    return false;
  }
  // The same from compiled code, whose graph has no gradient for i: whatever is
  // offered is added, also twice in a backward.
  virtual void on_only_product(std::int32_t /*i*/,
                               const at::Tensor& /*grad_output*/,
                               const at::Tensor& /*input*/) {}
  // A gradient reached one of the outputs of that forward call, kRecorded: of
  // what a recorded backward gave.
  static constexpr std::int64_t kRecorded = -1;
  virtual void on_output_gradient(std::int64_t call) = 0;
  // Every use of parameter i in this graph is done; undefined if none
  // contributed.
  virtual void on_parameter_gradient(std::int32_t i, at::Tensor gradient) = 0;
  // The gradients of one forward call's inputs are complete.
  virtual void on_inputs_done(const torch::autograd::Node* node) = 0;
  // torch.autograd.grad returns parameter i's gradient instead.
  virtual void on_gradient_returned(std::int32_t /*i*/) {}
  // The backward is recorded (create_graph): another one through what it gives,
  // `result`, will read the parameters, and begins with on_output_gradient.
  virtual void on_recorded_backward(WeakNodePtr /*result*/) {}
};

// What the backward on this thread does with the gradient that `node` would
// get: none, unwanted or asked_for.
Obstacle obstacle_of_inputs(const torch::autograd::Node* node);

// Replaces AccumulateGrad of `parameter` (a leaf that requires grad) by a node
// that hands the gradient to the receiver.  The returned pointer must be kept:
// the tensor holds it weakly.  Runs before every other ready node, as
// AccumulateGrad does, once per backward after all uses, hooks of the
// parameter included.  A gradient that is returned runs the hooks only.
NodePtr install_gradient_node(const at::Tensor& parameter,
                              std::weak_ptr<BackwardReceiver> receiver,
                              std::int32_t index);

// [Note: The stream of a gradient]
// The engine runs a node on the stream that was current when it was made, as
// autograd makes AccumulateGrad anew in every forward.  A gradient node stays:
// it moves to the stream of each forward.
void follow_current_stream(torch::autograd::Node& gradient_node);

// The dtype to which the engine casts what it hands to the node from now on;
// none: it casts nothing.
void set_gradient_dtype(torch::autograd::Node& gradient_node,
                        std::optional<at::ScalarType> dtype);

// Whether what made `inputs`, all requiring grad, is a few nodes that end at
// leaves, and no unit: they have been cut off from what was computed before.
bool are_made_of_leaves(const std::vector<at::Tensor>& inputs);

// Calls on_output_gradient(call) before the node that produced `output` runs.
void watch_output(const at::Tensor& output,
                  std::weak_ptr<BackwardReceiver> receiver, std::int64_t call);

// Passes `inputs` (all requiring grad) through one identity node; returns
// views of them, protected against in-place writes as the outputs of a custom
// function are.  The node calls on_inputs_done; of a backward that is recorded
// it watches the gradients it passes on.
struct WatchedInputs {
  std::vector<at::Tensor> tensors;
  WeakNodePtr node;
};
WatchedInputs watch_inputs(const std::vector<at::Tensor>& inputs,
                           std::weak_ptr<BackwardReceiver> receiver);

}  // namespace lowtide::shard
