// The gradient of rms_norm with the CPU's bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

namespace lowtide::phantom {

// In the dtype of `rstd`, on its device.
struct RmsNormGradients {
  // The input's gradient is the sum of these two.
  at::Tensor through_result;  // as a factor of the result
  at::Tensor through_square;  // by way of the mean of squares
  at::Tensor weight;          // in the weight's dtype
};

// The same operations in the same order as autograd's through the CPU's
// forward:  u = input,  r = rsqrt(mean(u^2) + eps),  y = u * r * weight.
// Parts that are not wanted, or have no weight, are undefined.
RmsNormGradients rms_norm_gradients(const at::Tensor& gradient,
                                    const at::Tensor& input,
                                    at::IntArrayRef shape,
                                    const at::Tensor& rstd,
                                    const std::optional<at::Tensor>& weight,
                                    bool want_input, bool want_weight);

// [Note: Two edges]
// On a CPU the input of rms_norm has two uses in the graph, unless it is cast
// first, and autograd adds their gradients to what the input got elsewhere one
// after the other.  A fused node hands over their sum, which rounds
// differently.  So in exact mode the fused node has two edges to its input.
void register_rms_norm_autograd(torch::Library& aten);

}  // namespace lowtide::phantom
