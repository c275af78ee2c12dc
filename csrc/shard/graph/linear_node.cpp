#include "shard/graph/linear_node.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/util/env.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

#include "device/current_stream.h"
#include "shard/graph/linear_operators.h"

namespace lowtide::shard {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

at::Tensor matrix_of(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor
                           : tensor.reshape_symint({-1, tensor.sym_size(-1)});
}

// As torch's linear does: elsewhere the product is rounded before the bias is
// added.
bool adds_bias_in_product(const at::Tensor& input) {
  static const bool flattens =
      c10::utils::get_env("TORCH_LINEAR_FLATTEN_3D") == "1";
  return input.dim() == 2 || input.is_contiguous_or_false() ||
         (flattens && input.dim() == 3);
}

// [Note: Products on other streams]
// Autograd orders streams by the gradients it passes on.  A product that is
// added in place is none: on another stream than the parameter's node has, it
// might leave before it is there.
bool runs_elsewhere(Node& node) {
  const auto stream = node.stream();
  return stream && *stream != device::current_stream(stream->device());
}

class LinearNode : public Node {
 public:
  LinearNode(const at::Tensor& input, const at::Tensor& weight)
      : input_(input, /*is_output=*/false),
        weight_(weight, /*is_output=*/false) {}

  std::string name() const override { return "lowtide::LinearBackward"; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    input_.reset_data();
    weight_.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    variable_list results(num_outputs());
    if (!gradients[0].defined()) {
      return results;
    }
    const auto grad_output = matrix_of(gradients[0]);
    if (task_should_compute_output(kInput)) {
      auto sizes = gradients[0].sym_sizes().vec();
      const auto weight = weight_.unpack();
      sizes.back() = weight.sym_size(1);
      results[kInput] = at::mm(grad_output, weight).view_symint(sizes);
    }
    if (task_should_compute_output(kWeight)) {
      results[kWeight] = weight_gradient(grad_output);
    }
    if (num_outputs() > kBias && task_should_compute_output(kBias)) {
      results[kBias] = grad_output.sum(0);
    }
    return results;
  }

 protected:
  // Undefined if it has been added in place.
  virtual at::Tensor weight_gradient(const at::Tensor& grad_output) = 0;

  static constexpr std::size_t kInput = 0;
  static constexpr std::size_t kWeight = 1;
  static constexpr std::size_t kBias = 2;
  SavedVariable input_;
  SavedVariable weight_;
};

class OfferingNode final : public LinearNode {
 public:
  OfferingNode(std::weak_ptr<BackwardReceiver> receiver, std::int32_t index,
               const at::Tensor& input, const at::Tensor& weight)
      : LinearNode(input, input.requires_grad() ? weight : at::Tensor()),
        receiver_(std::move(receiver)),
        index_(index) {}

 private:
  at::Tensor weight_gradient(const at::Tensor& grad_output) override {
    const auto input = matrix_of(input_.unpack());
    const auto receiver = receiver_.lock();
    if (receiver &&
        receiver->on_product(index_, grad_output, input,
                             obstacle_of(next_edge(kWeight).function))) {
      return {};
    }
    return at::mm(grad_output.t(), input);
  }

  std::weak_ptr<BackwardReceiver> receiver_;
  std::int32_t index_;
};

class TracedNode final : public LinearNode {
 public:
  using LinearNode::LinearNode;

 private:
  at::Tensor weight_gradient(const at::Tensor& grad_output) override {
    add_weight_gradient(weight_.unpack(), grad_output,
                        matrix_of(input_.unpack()));
    return {};
  }
};

at::Tensor recorded(const base::SharedNode<LinearNode>& node,
                    const at::Tensor& input, const at::Tensor& weight,
                    const at::Tensor& bias) {
  variable_list inputs{input, weight};
  if (bias.defined()) {
    inputs.push_back(bias);
  }
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  auto output = linear_without_record(input, weight, bias);
  torch::autograd::set_history(output, node);
  return output;
}

}  // namespace

Obstacle obstacle_of(const NodePtr& node) {
  if (at::GradMode::is_enabled()) {
    return Obstacle::recorded;
  }
  if (!node) {
    return Obstacle::none;
  }
  if (const auto obstacle = obstacle_of_inputs(node.get());
      obstacle != Obstacle::none) {
    return obstacle;
  }
  const bool hooked = !node->tensor_pre_hooks().empty() ||
                      !node->pre_hooks().empty() || !node->post_hooks().empty();
  if (hooked) {
    return Obstacle::hooks;
  }
  return runs_elsewhere(*node) ? Obstacle::elsewhere : Obstacle::none;
}

at::Tensor linear_without_record(const at::Tensor& input,
                                 const at::Tensor& weight,
                                 const at::Tensor& bias) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto matrix = matrix_of(input);
  const bool adds = bias.defined() && adds_bias_in_product(input);
  const auto product =
      adds ? at::addmm(bias, matrix, weight.t()) : at::mm(matrix, weight.t());
  if (input.dim() == 2) {
    return product;
  }
  auto sizes = input.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  auto output = product.view_symint(sizes);
  return adds || !bias.defined() ? output : output.add_(bias);
}

at::Tensor fused_linear(std::weak_ptr<BackwardReceiver> receiver,
                        std::int32_t index, const at::Tensor& input,
                        const at::Tensor& weight, const at::Tensor& bias) {
  return recorded(
      base::make_node<OfferingNode>(std::move(receiver), index, input, weight),
      input, weight, bias);
}

at::Tensor traced_linear(const at::Tensor& input, const at::Tensor& weight,
                         const at::Tensor& bias) {
  return recorded(base::make_node<TracedNode>(input, weight), input, weight,
                  bias);
}

}  // namespace lowtide::shard
