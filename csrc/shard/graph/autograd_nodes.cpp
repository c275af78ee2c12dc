#include "shard/graph/autograd_nodes.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/graph_task.h"
#include "device/current_stream.h"

namespace lowtide::shard {
namespace {

using torch::autograd::CreationMeta;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::variable_list;
namespace impl = torch::autograd::impl;

void refuse_create_graph() {
  if (at::GradMode::is_enabled()) {
    throw Error(base::error_text(
        "backward", "create_graph=False for parameters sharded by lowtide",
        "create_graph=True (or a backward inside an enable_grad context)",
        "Take the inner gradient with torch.autograd.grad(..., "
        "create_graph=True), and call backward() without it."));
  }
}

// [Note: A backward that is recorded]
// create_graph records a unit's backward: nodes that read its parameters once
// more in a backward through the results, the gradients of the unit's inputs or
// of its parameters.  Those results are watched as outputs of a forward are.
void watch_recorded(const variable_list& gradients,
                    const std::shared_ptr<BackwardReceiver>& receiver) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  for (const auto& gradient : gradients) {
    if (gradient.defined() && gradient.requires_grad()) {
      watch_output(gradient, receiver, BackwardReceiver::kRecorded);
      receiver->on_recorded_backward(gradient.grad_fn());
    }
  }
}

// Runs where torch.autograd.grad takes a gradient away: the hooks of the
// parameter, as ever, then ours.
class ReturnedHook final : public FunctionPreHook {
 public:
  ReturnedHook(at::Tensor parameter, std::weak_ptr<BackwardReceiver> receiver,
               std::int32_t index)
      : parameter_(std::move(parameter)),
        receiver_(std::move(receiver)),
        index_(index) {}

  variable_list operator()(const variable_list& gradients) override {
    auto results = gradients;
    for (const auto& hook : impl::hooks(parameter_)) {
      results = (*hook)(results);
    }
    if (const auto receiver = receiver_.lock()) {
      watch_recorded(results, receiver);
      receiver->on_gradient_returned(index_);
    }
    return results;
  }

 private:
  at::Tensor parameter_;
  std::weak_ptr<BackwardReceiver> receiver_;
  std::int32_t index_;
};

class GradientNode final : public base::WeaklyHeldNode {
 public:
  GradientNode(at::Tensor parameter, std::weak_ptr<BackwardReceiver> receiver,
               std::int32_t index)
      : WeaklyHeldNode(/*sequence_nr=*/UINT64_MAX),
        parameter_(std::move(parameter)),
        receiver_(std::move(receiver)),
        index_(index) {
    add_input_metadata(parameter_);
    returned_.push_back(
        std::make_unique<ReturnedHook>(parameter_, receiver_, index_));
  }

  std::string name() const override { return "lowtide::GradientNode"; }

  void follow_current_stream() {
    const auto device = parameter_.device();
    if (device.is_cpu()) {
      return;
    }
    if (input_metadata(0).stream() != device::current_stream(device)) {
      const auto dtype = input_metadata(0).grad_dtype();
      clear_input_metadata();
      add_input_metadata(parameter_);
      mutable_input_metadata(0).set_grad_dtype(dtype);
    }
  }

  // Hooks registered on the parameter run here, as with AccumulateGrad.
  std::vector<std::unique_ptr<FunctionPreHook>>& tensor_pre_hooks() noexcept
      override {
    return obstacle_of_inputs(this) == Obstacle::asked_for
               ? returned_
               : impl::hooks(parameter_);
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    if (gradients[0].defined()) {
      refuse_create_graph();
    }
    if (const auto receiver = receiver_.lock()) {
      receiver->on_parameter_gradient(index_, std::move(gradients[0]));
    }
    return {};
  }

 private:
  // The parameter, which holds the node weakly.
  void release_owned() override {
    parameter_.reset();
    returned_.clear();
  }

  at::Tensor parameter_;
  std::weak_ptr<BackwardReceiver> receiver_;
  std::int32_t index_;
  std::vector<std::unique_ptr<FunctionPreHook>> returned_;
};

class InputsNode final : public Node {
 public:
  explicit InputsNode(std::weak_ptr<BackwardReceiver> receiver)
      : receiver_(std::move(receiver)) {}

  std::string name() const override { return "lowtide::InputsNode"; }

  variable_list apply(variable_list&& gradients) override {
    if (const auto receiver = receiver_.lock()) {
      watch_recorded(gradients, receiver);
      receiver->on_inputs_done(this);
    }
    return std::move(gradients);
  }

 private:
  std::weak_ptr<BackwardReceiver> receiver_;
};

class OutputHook final : public FunctionPreHook {
 public:
  OutputHook(std::weak_ptr<BackwardReceiver> receiver, std::int64_t call)
      : receiver_(std::move(receiver)), call_(call) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto receiver = receiver_.lock()) {
      receiver->on_output_gradient(call_);
    }
    return gradients;
  }

 private:
  std::weak_ptr<BackwardReceiver> receiver_;
  std::int64_t call_;
};

// What torch does with an input that a custom function returns unchanged.
at::Tensor protected_view(const at::Tensor& input) {
  at::Tensor view;
  {
    const at::NoGradGuard no_grad;
    view = input.view_as(input);
  }
  if (view.is_view()) {
    impl::get_view_autograd_meta(view)->set_creation_meta(
        CreationMeta::IN_CUSTOM_FUNCTION);
  }
  return view;
}

}  // namespace

Obstacle obstacle_of_inputs(const Node* node) {
  switch (base::use_in_graph_task(node)) {
    case base::NodeUse::unwanted:
      return Obstacle::unwanted;
    case base::NodeUse::returned:
      return Obstacle::asked_for;
    case base::NodeUse::runs:
      break;
  }
  return Obstacle::none;
}

NodePtr install_gradient_node(const at::Tensor& parameter,
                              std::weak_ptr<BackwardReceiver> receiver,
                              std::int32_t index) {
  auto node =
      base::make_node<GradientNode>(parameter, std::move(receiver), index);
  impl::set_grad_accumulator(parameter, WeakNodePtr(node));
  return node;
}

void follow_current_stream(Node& gradient_node) {
  static_cast<GradientNode&>(gradient_node).follow_current_stream();
}

void set_gradient_dtype(Node& gradient_node,
                        std::optional<at::ScalarType> dtype) {
  gradient_node.mutable_input_metadata(0).set_grad_dtype(dtype);
}

bool are_made_of_leaves(const std::vector<at::Tensor>& inputs) {
  constexpr std::size_t kMostNodes = 16;
  std::vector<Node*> nodes;
  const auto add = [&](Node* node) {
    if (node != nullptr && std::ranges::find(nodes, node) == nodes.end()) {
      nodes.push_back(node);
    }
  };
  for (const auto& input : inputs) add(input.grad_fn().get());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    auto* const node = nodes[i];
    const bool leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node);
    if (nodes.size() > kMostNodes || (node->num_outputs() == 0 && !leaf) ||
        dynamic_cast<InputsNode*>(node) != nullptr) {
      return false;
    }
    for (const auto& edge : node->next_edges()) add(edge.function.get());
  }
  return true;
}

void watch_output(const at::Tensor& output,
                  std::weak_ptr<BackwardReceiver> receiver, std::int64_t call) {
  auto hook = std::make_unique<OutputHook>(std::move(receiver), call);
  if (const auto& producer = output.grad_fn()) {
    // impl::add_hook on a non-leaf never fires.
    producer->add_tensor_pre_hook(std::move(hook));
  } else {
    impl::add_hook(output, std::move(hook));
  }
}

WatchedInputs watch_inputs(const std::vector<at::Tensor>& inputs,
                           std::weak_ptr<BackwardReceiver> receiver) {
  auto node = base::make_node<InputsNode>(std::move(receiver));
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  WatchedInputs watched;
  watched.tensors.reserve(inputs.size());
  for (const auto& input : inputs) {
    auto view = protected_view(input);
    torch::autograd::set_history(view, node);
    watched.tensors.push_back(std::move(view));
  }
  watched.node = node;
  return watched;
}

}  // namespace lowtide::shard
