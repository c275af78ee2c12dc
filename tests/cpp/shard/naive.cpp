#include "naive.h"

#include <algorithm>

namespace lowtide::shard {
namespace {

class PlainLayers final : public Layers {
 public:
  PlainLayers(Parameters leaves, std::int64_t rank)
      : leaves_(std::move(leaves)), rank_(rank) {}
  at::Tensor call(std::size_t unit, const at::Tensor& x,
                  const Body& body) override {
    return body(leaves_[unit], x);
  }
  std::int64_t rank() const override { return rank_; }

 private:
  Parameters leaves_;
  std::int64_t rank_;
};

template <typename Function>
void for_each_parameter(const Scenario& scenario, Function function) {
  for (std::size_t u = 0; u < scenario.units.size(); ++u) {
    const auto& parameters = scenario.units[u].parameters;
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      function(u, p, parameters[p]);
    }
  }
}

Parameters none_for(const Scenario& scenario) {
  Parameters none;
  for (const UnitSpec& unit : scenario.units) {
    none.emplace_back(unit.parameters.size());
  }
  return none;
}

// Rows of `owner` summed over ranks and averaged; a rank without a gradient
// contributes the neutral element.
at::Tensor average(const std::vector<at::Tensor>& by_rank,
                   const ParameterSpec& spec, std::int64_t owner) {
  const auto world_size = static_cast<std::int64_t>(by_rank.size());
  const std::int64_t rows = (spec.sizes[0] + world_size - 1) / world_size;
  const std::int64_t first = std::min(owner * rows, spec.sizes[0]);
  const std::int64_t count = std::min(rows, spec.sizes[0] - first);
  at::Tensor sum;
  for (const std::int64_t rank : fold_order(world_size, owner)) {
    const at::Tensor& gradient = by_rank[rank];
    const at::Tensor own =
        gradient.defined()
            ? gradient.narrow(0, first, count)
            : at::full(spec.sizes, -0.0, spec.reduce).narrow(0, first, count);
    sum = sum.defined() ? sum.add_(own) : own.clone();
  }
  return sum.div_(world_size);
}

// What one reduction gives; undefined if no rank has a gradient.
at::Tensor reduce(const std::vector<at::Tensor>& by_rank,
                  const ParameterSpec& spec) {
  if (std::none_of(by_rank.begin(), by_rank.end(),
                   [](const auto& gradient) { return gradient.defined(); })) {
    return {};
  }
  std::vector<at::Tensor> rows;
  for (std::size_t owner = 0; owner < by_rank.size(); ++owner) {
    rows.push_back(average(by_rank, spec, static_cast<std::int64_t>(owner)));
  }
  return at::cat(rows);
}

}  // namespace

std::vector<std::int64_t> fold_order(std::int64_t world_size,
                                     std::int64_t owner) {
  std::vector<std::int64_t> order;
  for (std::int64_t i = 1; i <= world_size; ++i) {
    order.push_back((owner + world_size - i) % world_size);
  }
  return order;
}

at::Tensor input_of(const Scenario& scenario, std::int64_t rank, int step,
                    std::size_t microbatch) {
  return input_for(scenario.units, rank, 10 * (step + 1) + microbatch);
}

void optimize(const at::Tensor& parameter, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  parameter.sub_(gradient * 0.25);
}

std::vector<NaiveStep> train_naively(const Scenario& scenario,
                                     std::int64_t world_size) {
  Parameters masters = initial_parameters(scenario.units);
  std::vector<NaiveStep> steps;
  for (int s = 0; s < scenario.num_steps; ++s) {
    NaiveStep step;
    step.losses.resize(world_size);
    step.gradients = none_for(scenario);
    // Not yet reduced, by rank, in the wire's dtype.
    std::vector<Parameters> local(world_size, none_for(scenario));
    for (std::size_t m = 0; m < scenario.sync.size(); ++m) {
      for (std::int64_t rank = 0; rank < world_size; ++rank) {
        Parameters leaves = none_for(scenario);
        for_each_parameter(scenario, [&](auto u, auto p, const auto& spec) {
          leaves[u][p] = masters[u][p]
                             .to(spec.compute)
                             .clone()
                             .set_requires_grad(spec.trainable);
        });
        PlainLayers layers(leaves, rank);
        const at::Tensor loss =
            loss_of(scenario.program(layers, input_of(scenario, rank, s, m)));
        loss.backward();
        step.losses[rank].push_back(loss.detach());
        for_each_parameter(scenario, [&](auto u, auto p, const auto& spec) {
          if (!leaves[u][p].grad().defined()) return;
          at::Tensor& sum = local[rank][u][p];
          const at::Tensor gradient =
              leaves[u][p].grad().to_dense().to(spec.reduce);
          sum = sum.defined() ? sum + gradient : gradient;
        });
      }
      if (!scenario.sync[m]) continue;
      for_each_parameter(scenario, [&](auto u, auto p, const auto& spec) {
        std::vector<at::Tensor> by_rank;
        for (auto& parameters : local) by_rank.push_back(parameters[u][p]);
        const at::Tensor result = reduce(by_rank, spec);
        if (!result.defined()) return;
        at::Tensor& gradient = step.gradients[u][p];
        gradient = gradient.defined() ? gradient.add_(result.to(spec.storage))
                                      : result.to(spec.storage);
      });
      local.assign(world_size, none_for(scenario));
    }
    for_each_parameter(scenario, [&](auto u, auto p, const auto&) {
      masters[u][p] = masters[u][p].clone();
      if (step.gradients[u][p].defined()) {
        optimize(masters[u][p], step.gradients[u][p]);
      }
    });
    step.parameters = masters;
    steps.push_back(std::move(step));
  }
  return steps;
}

}  // namespace lowtide::shard
