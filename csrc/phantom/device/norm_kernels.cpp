// layer_norm and rms_norm as CUDA keeps them: one kernel each way, statistics
// in fp32.  The forward of rms_norm is the host's (pinned_kernels.cpp).
#include <ATen/AccumulateType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/sum.h>

#include <ATen/ExpandUtils.h>

#include <array>
#include <optional>
#include <tuple>

#include "phantom/device/host_call.h"
#include "phantom/device/kernels.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using at::IntArrayRef;
using at::Tensor;

at::ScalarType statistics_dtype(const Tensor& input) {
  return at::toAccumulateType(input.scalar_type(), /*is_cuda=*/true);
}

std::optional<Tensor> host(HostCall& call, const std::optional<Tensor>& value) {
  return value ? std::optional(call.host(*value)) : std::nullopt;
}

// The host's kernel keeps statistics in the dtype of its parameters; widening
// them is exact, and so is the way back.
at::ScalarType host_statistics_dtype(const Tensor& input,
                                     const std::optional<Tensor>& weight) {
  return weight && weight->defined() ? weight->scalar_type()
                                     : input.scalar_type();
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(
    const Tensor& input, IntArrayRef shape, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, double eps) {
  HostCall call;
  auto [output, mean, rstd] = at::native_layer_norm(
      call.host(input), shape, host(call, weight), host(call, bias), eps);
  const auto dtype = statistics_dtype(input);
  return {call.phantom(output), call.phantom(mean.to(dtype)),
          call.phantom(rstd.to(dtype))};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& gradient, const Tensor& input, IntArrayRef shape,
    const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, std::array<bool, 3> mask) {
  HostCall call;
  const auto dtype = host_statistics_dtype(input, weight);
  auto [d_input, d_weight, d_bias] = at::native_layer_norm_backward(
      call.host(gradient), call.host(input), shape, call.host(mean).to(dtype),
      call.host(rstd).to(dtype), host(call, weight), host(call, bias), mask);
  return {call.phantom(d_input), call.phantom(d_weight), call.phantom(d_bias)};
}

// The host has no kernel for this one.  The same operations in the same order
// as autograd's through the host's forward, so that the bits are the same:
//   u = input, p = u^2, r = rsqrt(mean(p) + eps), y = u * r * weight.
std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& gradient, const Tensor& input, IntArrayRef shape,
    const Tensor& rstd, const std::optional<Tensor>& weight,
    std::array<bool, 2> mask) {
  HostCall call;
  const Tensor x = call.host(input), r = call.host(rstd);
  const Tensor u = x.to(r.scalar_type());
  const Tensor d_result = call.host(gradient).to(r.scalar_type());
  const bool has_weight = weight && weight->defined();
  Tensor d_input, d_weight;
  if (mask[0]) {
    const Tensor d_y = has_weight ? d_result * call.host(*weight) : d_result;
    const Tensor d_r = at::sum_to(d_y * u, r.sizes());
    const Tensor d_mean = -0.5 * d_r * r.pow(3);
    const auto n = static_cast<double>(c10::multiply_integers(shape));
    const Tensor d_p = d_mean.expand(u.sizes()) / n;
    d_input = (d_y * r + d_p * (2 * u.pow(1))).to(x.scalar_type());
  }
  if (mask[1] && has_weight) {
    d_weight = at::sum_to(d_result * (u * r), weight->sizes())
                   .to(weight->scalar_type());
  }
  return {call.phantom(d_input), call.phantom(d_weight)};
}

}  // namespace

void register_norm_kernels(torch::Library& aten) {
  aten.impl("native_layer_norm", &layer_norm);
  aten.impl("native_layer_norm_backward", &layer_norm_backward);
  aten.impl("_fused_rms_norm_backward", &rms_norm_backward);
}

}  // namespace lowtide::phantom
