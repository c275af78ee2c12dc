#include "gather/linear_math.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

namespace lowtide::gather {
namespace {

at::Tensor rows_of(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.flatten(0, -2);
}

std::vector<std::int64_t> sizes_with(const at::Tensor& tensor,
                                     std::int64_t last) {
  auto sizes = tensor.sizes().vec();
  sizes.back() = last;
  return sizes;
}

}  // namespace

std::vector<at::Tensor> linears(const at::Tensor& input,
                                const std::vector<at::Tensor>& weights,
                                const std::vector<at::Tensor>& biases) {
  std::vector<at::Tensor> outputs;
  outputs.reserve(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& bias = biases[i];
    outputs.push_back(
        at::linear(input.to(weights[i].scalar_type()), weights[i],
                   bias.defined() ? std::optional(bias) : std::nullopt));
  }
  return outputs;
}

at::Tensor input_gradient(const std::vector<at::Tensor>& gradients,
                          const std::vector<at::Tensor>& weights,
                          at::ScalarType dtype, bool addmm) {
  at::Tensor sum;
  for (std::size_t i = weights.size(); i-- > 0;) {
    const at::Tensor& gradient = gradients[i];
    if (!gradient.defined()) continue;
    const at::Tensor rows = rows_of(gradient);
    if (!sum.defined()) {
      sum = rows.mm(weights[i]).to(dtype);
    } else if (addmm && weights[i].scalar_type() == dtype) {
      at::addmm_out(sum, sum, rows, weights[i]);
    } else {
      sum.add_(rows.mm(weights[i]).to(dtype));
    }
  }
  if (!sum.defined()) return sum;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) {
      return sum.view(sizes_with(gradient, sum.size(-1)));
    }
  }
  return sum;
}

at::Tensor weight_gradient(const at::Tensor& gradient,
                           const at::Tensor& input) {
  const at::Tensor rows = rows_of(gradient);
  return rows.t().mm(rows_of(input).to(gradient.scalar_type()));
}

at::Tensor bias_gradient(const at::Tensor& gradient) {
  return rows_of(gradient).sum(0);
}

}  // namespace lowtide::gather
