#include "phantom/device/rms_norm.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>
#include <vector>

#include "phantom/device/host_call.h"

namespace lowtide::phantom {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& input,
                               const Tensor& /*same*/,
                               const std::optional<Tensor>& weight,
                               std::vector<std::int64_t> shape,
                               std::optional<double> eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [output, rstd] = at::_fused_rms_norm(input, shape, weight, eps);
    context->save_for_backward({input, rstd, weight.value_or(Tensor())});
    context->saved_data["shape"] = std::move(shape);
    context->mark_non_differentiable({rstd});
    return {output, rstd};
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &input = saved[0], &rstd = saved[1], &weight = saved[2];
    const at::AutoDispatchBelowADInplaceOrView below;
    HostCall call;
    const auto parts = rms_norm_gradients(
        call.host(gradients[0]), call.host(input),
        context->saved_data["shape"].toIntVector(), call.host(rstd),
        weight.defined() ? std::optional(call.host(weight)) : std::nullopt,
        context->needs_input_grad(0), context->needs_input_grad(2));
    Tensor first = parts.through_result, second = parts.through_square;
    if (first.defined() && input.scalar_type() != rstd.scalar_type()) {
      // The cast has one use, and sums before it rounds.
      first = (first + second).to(input.scalar_type());
      second = Tensor();
    }
    return {call.phantom(first), call.phantom(second),
            call.phantom(parts.weight), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, IntArrayRef shape,
                                    const std::optional<Tensor>& weight,
                                    std::optional<double> eps) {
  auto outputs = RmsNorm::apply(input, input, weight, shape.vec(), eps);
  return {outputs[0], outputs[1]};
}

}  // namespace

RmsNormGradients rms_norm_gradients(const Tensor& gradient, const Tensor& input,
                                    IntArrayRef shape, const Tensor& rstd,
                                    const std::optional<Tensor>& weight,
                                    bool want_input, bool want_weight) {
  const Tensor u = input.to(rstd.scalar_type());
  const Tensor d_result = gradient.to(rstd.scalar_type());
  const bool has_weight = weight && weight->defined();
  RmsNormGradients found;
  if (want_input) {
    const Tensor d_y = has_weight ? d_result * *weight : d_result;
    const Tensor d_r = at::sum_to(d_y * u, rstd.sizes());
    const Tensor d_mean = -0.5 * d_r * rstd.pow(3);
    const auto n = static_cast<double>(c10::multiply_integers(shape));
    const Tensor d_square = d_mean.expand(u.sizes()) / n;
    found.through_result = d_y * rstd;
    found.through_square = d_square * (2 * u.pow(1));
  }
  if (want_weight && has_weight) {
    found.weight = at::sum_to(d_result * (u * rstd), weight->sizes())
                       .to(weight->scalar_type());
  }
  return found;
}

void register_rms_norm_autograd(torch::Library& aten) {
  aten.impl("_fused_rms_norm", &rms_norm);
}

}  // namespace lowtide::phantom
