// The sequence-parallel operators in the autograd graph.
//
// How torch holds a node differs between its versions: base/torch_version.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gather/axis.h"
#include "gather/site.h"

namespace lowtide::gather {

struct GatherOptions {
  std::string name;
  bool regather = false;  // keep the shard, not the gathered value
  std::int64_t prefetch_bytes = kPrefetchBytes;
};

// [rows, ...] of every rank to [size * rows, ...].  Backward: a reduce-scatter.
struct Gathered {
  at::Tensor tensor;
  std::shared_ptr<Site> site;  // null unless `regather`
};
Gathered all_gather(const std::shared_ptr<Axis>& axis, const at::Tensor& shard,
                    const GatherOptions& options);

// [size * rows, ...] of every rank to this rank's rows of the sum.  Backward:
// an all-gather.
at::Tensor reduce_scatter(const std::shared_ptr<Axis>& axis,
                          const at::Tensor& partial);

// The gathered shard through several linear layers, in one node: one gather in
// forward, with `regather` one more in backward, one reduce-scatter of the
// shard's gradient.  Undefined biases are none.
struct LinearOptions {
  GatherOptions gather;
  bool addmm = false;  // see linear_math.h
};
std::vector<at::Tensor> gather_linear(const std::shared_ptr<Axis>& axis,
                                      const at::Tensor& shard,
                                      const std::vector<at::Tensor>& weights,
                                      const std::vector<at::Tensor>& biases,
                                      const LinearOptions& options);

// --- without autograd, for operators that a compiler treats as opaque --------
// outputs, and behind them the gathered value
std::vector<at::Tensor> gather_linear_forward(
    const std::shared_ptr<Axis>& axis, const at::Tensor& shard,
    const std::vector<at::Tensor>& weights,
    const std::vector<at::Tensor>& biases, const std::string& name,
    bool regather);

// Which gradients are asked for.
struct Needs {
  bool shard = false;
  std::vector<bool> weights;
  std::vector<bool> biases;
};
struct LinearGradients {
  at::Tensor shard;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
};
// `input`: the gathered value, or the shard if `regather`.
LinearGradients gather_linear_backward(const std::shared_ptr<Axis>& axis,
                                       const at::Tensor& input, bool regather,
                                       const std::vector<at::Tensor>& gradients,
                                       const std::vector<at::Tensor>& weights,
                                       const Needs& needs, bool addmm,
                                       const std::string& name);

}  // namespace lowtide::gather
