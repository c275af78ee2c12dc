// layer_norm and rms_norm as CUDA keeps them: one kernel each way, statistics
// in fp32.  The forward of rms_norm is the host's (pinned_kernels.cpp).
#include <ATen/ceil_div.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "phantom/cuda_kernels/cuda_call.h"
#include "phantom/device/device_clock.h"
#include "phantom/device/host_call.h"
#include "phantom/device/kernels.h"
#include "phantom/device/rms_norm.h"

namespace lowtide::phantom {
namespace {

using at::IntArrayRef;
using at::Tensor;

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
  const auto copy = temporary(bytes_to_be_contiguous(input));
  HostCall call;
  auto [output, mean, rstd] = at::native_layer_norm(
      call.host(input), shape, host(call, weight), host(call, bias), eps);
  const auto dtype = accumulator_of(input.scalar_type());
  const Tensor result = call.phantom(output);
  time_kernel("aten::native_layer_norm", {input, result});
  return {result, call.phantom(mean.to(dtype)), call.phantom(rstd.to(dtype))};
}

// With many rows of few columns, the gradient of a weight or bias is first
// summed over blocks of 32 rows, then over the blocks.
struct ColumnSums {
  std::int64_t blocks = 0;

  ColumnSums(const Tensor& input, IntArrayRef shape) {
    constexpr std::int64_t kManyRows = 65536, kWidth = 32, kRows = 32,
                           kMostBlocks = 32768;
    const std::int64_t columns = c10::multiply_integers(shape);
    const std::int64_t rows = columns == 0 ? 0 : input.numel() / columns;
    if (rows <= kManyRows || columns / kWidth >= kMultiprocessors / 2) return;
    blocks = std::min(kMostBlocks / at::ceil_div(columns, kWidth),
                      at::ceil_div(rows, kRows));
  }

  Tensor first_pass(const Tensor& gradient) const {
    if (blocks == 0 || !gradient.defined()) return {};
    return at::empty({blocks, gradient.numel()}, gradient.options());
  }
  // The sum takes the place of `gradient`, whose values it has.
  static void second_pass(const Tensor& sums, Tensor& gradient) {
    if (!sums.defined()) return;
    Tensor total = sums.sum(0).view(gradient.sizes());
    HostCall().host(total).copy_(HostCall().host(gradient));
    gradient = std::move(total);
  }
};

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& gradient, const Tensor& input, IntArrayRef shape,
    const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, std::array<bool, 3> mask) {
  const auto input_copy = temporary(bytes_to_be_contiguous(input));
  Tensor d_input, d_weight, d_bias;
  {
    HostCall call;
    const auto dtype = host_statistics_dtype(input, weight);
    auto [x, w, b] = at::native_layer_norm_backward(
        call.host(gradient), call.host(input), shape, call.host(mean).to(dtype),
        call.host(rstd).to(dtype), host(call, weight), host(call, bias), mask);
    d_input = call.phantom(x);
    d_weight = call.phantom(w);
    d_bias = call.phantom(b);
  }
  const auto gradient_copy = temporary(bytes_to_be_contiguous(gradient));
  const ColumnSums columns(input, shape);
  const Tensor weight_sums = columns.first_pass(d_weight);
  const Tensor bias_sums = columns.first_pass(d_bias);
  ColumnSums::second_pass(weight_sums, d_weight);
  ColumnSums::second_pass(bias_sums, d_bias);
  // One kernel for the input, one for the parameters.
  time_kernel("aten::native_layer_norm_backward", {gradient, input, d_input});
  if (d_weight.defined() || d_bias.defined()) {
    time_kernel("aten::native_layer_norm_backward",
                {gradient, input, d_weight, d_bias});
  }
  return {d_input, d_weight, d_bias};
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& gradient, const Tensor& input, IntArrayRef shape,
    const Tensor& rstd, const std::optional<Tensor>& weight,
    std::array<bool, 2> mask) {
  const auto input_copy = temporary(bytes_to_be_contiguous(input));
  Tensor d_input, d_weight;
  {
    HostCall call;
    const auto parts = rms_norm_gradients(call.host(gradient), call.host(input),
                                          shape, call.host(rstd),
                                          host(call, weight), mask[0], mask[1]);
    if (mask[0]) {
      d_input = call.phantom((parts.through_result + parts.through_square)
                                 .to(input.scalar_type()));
    }
    d_weight = call.phantom(parts.weight);
  }
  const auto gradient_copy = temporary(bytes_to_be_contiguous(gradient));
  const Tensor sums = ColumnSums(input, shape).first_pass(d_weight);
  ColumnSums::second_pass(sums, d_weight);
  time_kernel("aten::_fused_rms_norm_backward", {gradient, input, d_input});
  if (d_weight.defined()) {
    time_kernel("aten::_fused_rms_norm_backward", {gradient, input, d_weight});
  }
  return {d_input, d_weight};
}

}  // namespace

void register_norm_kernels(torch::Library& aten) {
  aten.impl("native_layer_norm", &layer_norm);
  aten.impl("native_layer_norm_backward", &layer_norm_backward);
  aten.impl("_fused_rms_norm_backward", &rms_norm_backward);
}

}  // namespace lowtide::phantom
