// Gradients that a CPU program would get, computed from inside a kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lowtide::phantom {

using HostFunction =
    std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

// `function` of host tensors, run as a user's program runs it, composites and
// autograd included; `tracked[i]` says whether input i requires a gradient.
at::Tensor host_forward(const HostFunction& function,
                        const std::vector<at::Tensor>& inputs,
                        const std::vector<bool>& tracked);

// Its gradients with respect to the tracked inputs, undefined for the others.
std::vector<at::Tensor> host_backward(const HostFunction& function,
                                      const std::vector<at::Tensor>& inputs,
                                      const std::vector<bool>& tracked,
                                      const at::Tensor& gradient);

}  // namespace lowtide::phantom
