// layer_norm and rms_norm as CUDA keeps them: one kernel each way, statistics
// in fp32.  The forward of rms_norm is the host's (pinned_kernels.cpp).
#include <ATen/AccumulateType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>

#include <array>
#include <optional>
#include <tuple>

#include "phantom/device/host_call.h"
#include "phantom/device/kernels.h"
#include "phantom/device/rms_norm.h"

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

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& gradient, const Tensor& input, IntArrayRef shape,
    const Tensor& rstd, const std::optional<Tensor>& weight,
    std::array<bool, 2> mask) {
  HostCall call;
  const auto parts =
      rms_norm_gradients(call.host(gradient), call.host(input), shape,
                         call.host(rstd), host(call, weight), mask[0], mask[1]);
  Tensor d_input;
  if (mask[0]) {
    d_input =
        (parts.through_result + parts.through_square).to(input.scalar_type());
  }
  return {call.phantom(d_input), call.phantom(parts.weight)};
}

}  // namespace

void register_norm_kernels(torch::Library& aten) {
  aten.impl("native_layer_norm", &layer_norm);
  aten.impl("native_layer_norm_backward", &layer_norm_backward);
  aten.impl("_fused_rms_norm_backward", &rms_norm_backward);
}

}  // namespace lowtide::phantom
