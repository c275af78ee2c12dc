#include "shard/graph/written_gradients.h"

#include <algorithm>
#include <utility>

#include "base/graph_task.h"

namespace lowtide::shard {

void WrittenGradients::watch(std::vector<at::Tensor> full,
                             const std::vector<NodePtr>& nodes) {
  parameters_.clear();
  for (std::size_t i = 0; i < full.size(); ++i) {
    parameters_.push_back({std::move(full[i]), nodes[i].get()});
  }
}

at::Tensor WrittenGradients::take(std::int32_t i) {
  const auto& full = parameters_[static_cast<std::size_t>(i)].full;
  return any(i) ? std::exchange(full.mutable_grad(), {}) : at::Tensor();
}

bool WrittenGradients::any(std::int32_t i) const {
  return parameters_[static_cast<std::size_t>(i)].full.grad().defined();
}

void WrittenGradients::inputs_done() {
  const auto role = [](const Parameter& parameter) {
    return parameter.node != nullptr && base::in_graph_task(parameter.node)
               ? obstacle_of_inputs(parameter.node)
               : Obstacle::none;
  };
  // A backward of some weights may pass through, too.
  const bool of_weights =
      std::any_of(parameters_.begin(), parameters_.end(), [&](const auto& p) {
        return p.node != nullptr &&
               obstacle_of_inputs(p.node) != Obstacle::unwanted;
      });
  if (of_weights) {
    return;
  }
  for (auto& parameter : parameters_) {
    parameter.missing += role(parameter) == Obstacle::unwanted ? 1 : 0;
  }
}

void WrittenGradients::returned(std::int32_t i) {
  auto& missing = parameters_[static_cast<std::size_t>(i)].missing;
  missing = std::max(0, missing - 1);
}

std::int32_t WrittenGradients::take_missing() {
  std::int32_t missing = -1;
  for (std::size_t i = parameters_.size(); i-- > 0;) {
    if (std::exchange(parameters_[i].missing, 0) > 0) {
      missing = static_cast<std::int32_t>(i);
    }
  }
  return missing;
}

void WrittenGradients::clear() {
  for (auto& parameter : parameters_) {
    parameter.missing = 0;
    if (parameter.full.defined()) parameter.full.mutable_grad().reset();
  }
}

}  // namespace lowtide::shard
