// What torch.utils.checkpoint(use_reentrant=True) does: forward without grad,
// in backward the same again with grad and a backward of its own.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/torch_version.h"
#include "layers.h"

namespace lowtide::shard {

using Region = std::function<at::Tensor(const at::Tensor& x)>;

class ReentrantNode final : public torch::autograd::Node {
 public:
  ReentrantNode(Region region, at::Tensor x)
      : region_(std::move(region)), x_(std::move(x)) {}

  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    const at::AutoGradMode enable_grad(true);
    const at::Tensor x = x_.detach().set_requires_grad(true);
    region_(x).backward(gradients[0]);
    return {x.grad()};
  }

 private:
  Region region_;
  at::Tensor x_;
};

// `x` requires grad.
inline at::Tensor reentrant_checkpoint(Region region, const at::Tensor& x) {
  at::Tensor y;
  {
    const at::NoGradGuard no_grad;
    y = region(x);
  }
  auto node = base::make_node<ReentrantNode>(std::move(region), x.detach());
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::set_history(y, node);
  return y;
}

// Every listed unit in a checkpoint of its own, then the model's own layer.
inline Program checkpointed(std::vector<std::size_t> order) {
  return [order](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& in) {
      at::Tensor y =
          in.requires_grad() ? in : in.detach().set_requires_grad(true);
      for (const std::size_t unit : order) {
        y = reentrant_checkpoint(
            [&layers, unit](const at::Tensor& h) {
              return layers.call(unit, h, layer());
            },
            y);
      }
      return layer()(parameters, y);
    });
  };
}

}  // namespace lowtide::shard
