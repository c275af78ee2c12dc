#include "shard/graph/linear_operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>

#include "base/check.h"
#include "shard/graph/linear_node.h"
#include "shard/graph/weight_owners.h"

namespace lowtide::shard {
namespace {

constexpr const char* kWho = "torch.compile of a layer with grads=\"fused\"";

at::Tensor fused_linear_recorded(const at::Tensor& input,
                                 const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias) {
  return traced_linear(input, weight, bias.value_or(at::Tensor()));
}

at::Tensor fused_linear_computed(const at::Tensor& input,
                                 const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias) {
  return linear_without_record(input, weight, bias.value_or(at::Tensor()));
}

// Whether the gradient is wanted; throws if autograd has to see it.
bool is_wanted(const WeightOwner& owner) {
  const auto obstacle = obstacle_of(owner.node);
  if (obstacle == Obstacle::none || obstacle == Obstacle::unwanted) {
    return obstacle == Obstacle::none;
  }
  throw Error(base::error_text(
      kWho, "a weight gradient that only the optimizer reads",
      obstacle == Obstacle::hooks ? "hooks on the full parameter"
      : obstacle == Obstacle::asked_for
          ? "torch.autograd.grad with respect to the full parameter"
      : obstacle == Obstacle::elsewhere
          ? "a call on another stream than the model's forward began on"
          : "create_graph",
      "Shard the module with grads=\"exact\", or do not compile it."));
}

void add_to_owner(const at::Tensor& weight, const at::Tensor& grad_output,
                  const at::Tensor& activation) {
  const auto owner = owner_of(weight);
  if (!owner) {
    throw Error(base::error_text(
        kWho, "the full parameter that lowtide gathered, in backward",
        "another tensor, or one whose model is gone",
        "torch.func.functional_call with other weights needs "
        "grads=\"exact\"."));
  }
  if (is_wanted(*owner)) {
    owner->receiver->on_only_product(owner->index, grad_output, activation);
  }
}

TORCH_LIBRARY_FRAGMENT(lowtide, m) {
  m.def("fused_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "add_weight_gradient(Tensor weight, Tensor grad_output, Tensor "
      "activation) -> ()");
}

TORCH_LIBRARY_IMPL(lowtide, Autograd, m) {
  m.impl("fused_linear", &fused_linear_recorded);
  m.impl("add_weight_gradient", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(lowtide, CompositeExplicitAutograd, m) {
  m.impl("fused_linear", &fused_linear_computed);
  m.impl("add_weight_gradient", &add_to_owner);
}

TORCH_LIBRARY_IMPL(lowtide, Meta, m) {
  m.impl("add_weight_gradient",
         [](const at::Tensor&, const at::Tensor&, const at::Tensor&) {});
}

}  // namespace

void add_weight_gradient(const at::Tensor& weight,
                         const at::Tensor& grad_output,
                         const at::Tensor& activation) {
  static const auto operation =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("lowtide::add_weight_gradient", "")
          .typed<void(const at::Tensor&, const at::Tensor&,
                      const at::Tensor&)>();
  operation.call(weight, grad_output, activation);
}

}  // namespace lowtide::shard
