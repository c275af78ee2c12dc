// Linear layers on one gathered input, as autograd's own formulas compute them:
// the same operators in the same order, so the same bits.
//
// input: [tokens, features], or [rows, ..., features], contiguous; weights[i]:
// [outputs_i, features]; biases[i]: [outputs_i] or undefined.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lowtide::gather {

std::vector<at::Tensor> linears(const at::Tensor& input,
                                const std::vector<at::Tensor>& weights,
                                const std::vector<at::Tensor>& biases);

// The gradient of `input`: sum over i of gradients[i] x weights[i], added from
// the last layer to the first, in which order autograd reaches them.  Undefined
// if all gradients are.  `addmm`: every product is added inside the matrix
// multiplication, which saves a temporary of the input's size and rounds bf16
// sums once less.
at::Tensor input_gradient(const std::vector<at::Tensor>& gradients,
                          const std::vector<at::Tensor>& weights,
                          at::ScalarType dtype, bool addmm);

at::Tensor weight_gradient(const at::Tensor& gradient, const at::Tensor& input);
at::Tensor bias_gradient(const at::Tensor& gradient);

}  // namespace lowtide::gather
