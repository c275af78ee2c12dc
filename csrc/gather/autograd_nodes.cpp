#include "gather/autograd_nodes.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/torch_version.h"
#include "gather/linear_math.h"

namespace lowtide::gather {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Tensors = std::vector<at::Tensor>;

void refuse_create_graph(const std::string& name) {
  if (at::GradMode::is_enabled()) {
    throw Error(base::error_text(
        base::concat("sequence-parallel gather '", name, "'"),
        "a backward without create_graph", "create_graph=True",
        "Compute higher-order derivatives on a model without sequence "
        "parallelism."));
  }
}

bool needs_graph(const Tensors& tensors) {
  return at::GradMode::is_enabled() &&
         torch::autograd::any_variable_requires_grad(tensors);
}

std::string line_of(const at::Tensor& shard, const GatherOptions& options) {
  return base::concat("'", options.name, "' ",
                      c10::toString(shard.scalar_type()), " ", shard.sizes(),
                      options.regather ? ", gathered again in backward" : "");
}

at::Tensor gather_now(const std::shared_ptr<Axis>& axis,
                      const at::Tensor& shard, const GatherOptions& options) {
  axis->announce(line_of(shard, options));
  at::Tensor gathered =
      axis->all_gather(shard, options.name, /*ours=*/false).take();
  axis->count(options.name, [](Figures& figures) { ++figures.gathers; });
  return gathered;
}

class GatherNode final : public Node {
 public:
  GatherNode(std::shared_ptr<Axis> axis, std::string name)
      : axis_(std::move(axis)), name_(std::move(name)) {}
  std::string name() const override { return "lowtide::SpAllGather"; }

  variable_list apply(variable_list&& gradients) override {
    refuse_create_graph(name_);
    axis_->agree();
    if (!gradients[0].defined()) return {at::Tensor()};
    return {axis_->reduce_scatter(gradients[0], name_).take()};
  }

 private:
  const std::shared_ptr<Axis> axis_;
  const std::string name_;
};

constexpr const char* kReduceScatter = "sp_reduce_scatter";

class ReduceScatterNode final : public Node {
 public:
  explicit ReduceScatterNode(std::shared_ptr<Axis> axis)
      : axis_(std::move(axis)) {}
  std::string name() const override { return "lowtide::SpReduceScatter"; }

  variable_list apply(variable_list&& gradients) override {
    refuse_create_graph(kReduceScatter);
    axis_->agree();
    if (!gradients[0].defined()) return {at::Tensor()};
    return {
        axis_->all_gather(gradients[0], kReduceScatter, /*ours=*/false).take()};
  }

 private:
  const std::shared_ptr<Axis> axis_;
};

// Where backward's input comes from: on its way from `start` on.
struct Input {
  std::function<void()> start;
  std::function<at::Tensor()> take;
  // Called when the collective for the shard's gradient is on its way.
  std::function<void()> prefetch;
};

// [Note: Order in backward] The re-gather runs under the products for the
// shard's gradient; that gradient's reduce-scatter, and the gather for the site
// that comes next, run under the products for the weights.
LinearGradients backward(Axis& axis, const Input& input, Tensors gradients,
                         const Tensors& weights, const Needs& needs,
                         at::ScalarType dtype, bool addmm,
                         const std::string& name) {
  LinearGradients result;
  result.weights.resize(weights.size());
  result.biases.resize(weights.size());
  bool any_weight = false;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    any_weight |= needs.weights[i] && gradients[i].defined();
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (any_weight) input.start();
  std::optional<Arriving> shard;
  if (needs.shard) {
    at::Tensor full = input_gradient(gradients, weights, dtype, addmm);
    if (full.defined()) shard.emplace(axis.reduce_scatter(full, name));
  }
  input.prefetch();
  const at::Tensor gathered = any_weight ? input.take() : at::Tensor();
  for (std::size_t i = weights.size(); i-- > 0;) {
    at::Tensor gradient = std::exchange(gradients[i], at::Tensor());
    if (!gradient.defined()) continue;
    if (needs.weights[i]) {
      result.weights[i] = weight_gradient(gradient, gathered);
    }
    if (needs.biases[i]) result.biases[i] = bias_gradient(gradient);
  }
  if (shard) result.shard = shard->take();
  return result;
}

class GatherLinearNode final : public Node {
 public:
  GatherLinearNode(std::shared_ptr<Axis> axis, LinearOptions options,
                   at::ScalarType dtype)
      : axis_(std::move(axis)), options_(std::move(options)), dtype_(dtype) {}
  std::string name() const override { return "lowtide::SpGatherLinear"; }

  void save(const at::Tensor& shard, const at::Tensor& gathered,
            const Tensors& weights) {
    for (const at::Tensor& weight : weights)
      weights_.emplace_back(weight, false);
    if (!any_weight_requires_grad(weights)) return;
    if (!options_.gather.regather) {
      gathered_.emplace(gathered, false);
      return;
    }
    site_ = Site::make(axis_, options_.gather.name, shard,
                       options_.gather.prefetch_bytes);
    site_->add_consumer();
  }
  const std::shared_ptr<Site>& site() const { return site_; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    weights_.clear();
    gathered_.reset();
    site_.reset();
    released_ = true;
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    refuse_create_graph(options_.gather.name);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    axis_->agree();
    const std::size_t n = weights_.size();
    Tensors weights;
    Needs needs{task_should_compute_output(0), {}, {}};
    for (std::size_t i = 0; i < n; ++i) {
      weights.push_back(weights_[i].unpack());
      needs.weights.push_back(task_should_compute_output(1 + i));
      needs.biases.push_back(task_should_compute_output(1 + n + i));
    }
    const Input input{
        [&] {
          if (site_) site_->start();
        },
        [&] { return site_ ? site_->take(0) : gathered_->unpack(); },
        [&] {
          if (site_) site_->prefetch_earlier();
        }};
    LinearGradients result =
        backward(*axis_, input, std::move(gradients), weights, needs, dtype_,
                 options_.addmm, options_.gather.name);
    variable_list all{std::move(result.shard)};
    for (auto& weight : result.weights) all.push_back(std::move(weight));
    for (auto& bias : result.biases) all.push_back(std::move(bias));
    return all;
  }

 private:
  static bool any_weight_requires_grad(const Tensors& weights) {
    return torch::autograd::any_variable_requires_grad(weights);
  }

  const std::shared_ptr<Axis> axis_;
  const LinearOptions options_;
  const at::ScalarType dtype_;
  std::vector<SavedVariable> weights_;
  std::optional<SavedVariable> gathered_;
  std::shared_ptr<Site> site_;
  bool released_ = false;
};

// What autocast does to the arguments of a linear layer.
void autocast(Tensors& weights, Tensors& biases) {
  const auto device = weights.at(0).device().type();
  if (!at::autocast::is_autocast_enabled(device)) return;
  const auto dtype = at::autocast::get_autocast_dtype(device);
  for (auto* list : {&weights, &biases}) {
    for (at::Tensor& tensor : *list) {
      if (tensor.defined()) {
        tensor = at::autocast::cached_cast(dtype, tensor, device);
      }
    }
  }
}

}  // namespace

Gathered all_gather(const std::shared_ptr<Axis>& axis, const at::Tensor& shard,
                    const GatherOptions& options) {
  Gathered result{gather_now(axis, shard, options), nullptr};
  if (options.regather && at::GradMode::is_enabled()) {
    result.site = Site::make(axis, options.name, shard, options.prefetch_bytes);
  }
  if (needs_graph({shard})) {
    const auto node = base::make_node<GatherNode>(axis, options.name);
    node->set_next_edges(torch::autograd::collect_next_edges(shard));
    torch::autograd::set_history(result.tensor, node);
    if (result.site) result.site->set_node(node);
  }
  if (result.site) result.site->watch(result.tensor);
  return result;
}

at::Tensor reduce_scatter(const std::shared_ptr<Axis>& axis,
                          const at::Tensor& partial) {
  axis->announce(base::concat("'", kReduceScatter, "' ",
                              c10::toString(partial.scalar_type()), " ",
                              partial.sizes()));
  at::Tensor result = axis->reduce_scatter(partial, kReduceScatter).take();
  if (needs_graph({partial})) {
    const auto node = base::make_node<ReduceScatterNode>(axis);
    node->set_next_edges(torch::autograd::collect_next_edges(partial));
    torch::autograd::set_history(result, node);
  }
  return result;
}

std::vector<at::Tensor> gather_linear(const std::shared_ptr<Axis>& axis,
                                      const at::Tensor& shard,
                                      const Tensors& own_weights,
                                      const Tensors& own_biases,
                                      const LinearOptions& options) {
  Tensors weights = own_weights;
  Tensors biases = own_biases;
  autocast(weights, biases);
  Tensors inputs{shard};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  inputs.insert(inputs.end(), biases.begin(), biases.end());
  at::Tensor gathered = gather_now(axis, shard, options.gather);
  Tensors outputs;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    outputs = linears(gathered, weights, biases);
  }
  if (!needs_graph(inputs)) return outputs;
  const auto node =
      base::make_node<GatherLinearNode>(axis, options, shard.scalar_type());
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  node->save(shard, gathered, weights);
  for (at::Tensor& output : outputs) {
    torch::autograd::set_history(output, node);
  }
  if (node->site()) node->site()->set_node(node);
  return outputs;
}

std::vector<at::Tensor> gather_linear_forward(const std::shared_ptr<Axis>& axis,
                                              const at::Tensor& shard,
                                              const Tensors& weights,
                                              const Tensors& biases,
                                              const std::string& name,
                                              bool regather) {
  at::Tensor gathered = gather_now(axis, shard, {name, regather, 0});
  Tensors outputs = linears(gathered, weights, biases);
  outputs.push_back(std::move(gathered));
  return outputs;
}

LinearGradients gather_linear_backward(const std::shared_ptr<Axis>& axis,
                                       const at::Tensor& input, bool regather,
                                       const Tensors& gradients,
                                       const Tensors& weights,
                                       const Needs& needs, bool addmm,
                                       const std::string& name) {
  axis->agree();
  std::optional<Arriving> arriving;
  const Input source{
      [&] {
        if (!regather) return;
        arriving.emplace(axis->all_gather(input, name, /*ours=*/true));
        axis->count(name, [](Figures& figures) { ++figures.regathers; });
      },
      [&] { return regather ? arriving->take() : input; }, [] {}};
  return backward(*axis, source, gradients, weights, needs, input.scalar_type(),
                  addmm, name);
}

}  // namespace lowtide::gather
