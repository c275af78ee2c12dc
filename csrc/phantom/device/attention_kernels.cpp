// scaled_dot_product_attention: CUDA's allocations, the CPU's values.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>

#include <array>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "phantom/cuda_kernels/attention.h"
#include "phantom/device/device_clock.h"
#include "phantom/device/generator.h"
#include "phantom/device/host_autograd.h"
#include "phantom/device/host_call.h"
#include "phantom/device/kernels.h"
#include "phantom/device/operator_work.h"
#include "phantom/device/phantom_device.h"
#include "phantom/device/random_scope.h"

namespace lowtide::phantom {
namespace {

using at::Tensor;
using c10::SymInt;
using Tensors = std::vector<Tensor>;

struct Settings {
  double dropout;
  bool is_causal;
  std::optional<double> scale;
};

// Exact mode comes here wherever the CPU may have a fused kernel: its values
// are what counts then.  Where CUDA would compose (fp32 with grouped heads, for
// instance), the memory counted is that of the efficient kernel.
std::int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value,
                    const std::optional<Tensor>& mask, double, bool is_causal,
                    std::optional<double>, bool) {
  const bool fused =
      choose_attention(query, key, value, mask, is_causal) != Attention::math ||
      (phantom_device().exact() && query.dim() == 4);
  return static_cast<std::int64_t>(fused ? sdp::SDPBackend::overrideable
                                         : sdp::SDPBackend::math);
}

// Of query, key, value and, if defined, mask.
HostFunction attention(const Settings& settings) {
  return [settings](const Tensors& inputs) {
    const Tensor &query = inputs[0], &key = inputs[1], &mask = inputs[3];
    return at::scaled_dot_product_attention(
        query, key, inputs[2],
        mask.defined() ? std::optional(mask) : std::nullopt, settings.dropout,
        settings.is_causal, settings.scale,
        /*enable_gqa=*/query.size(1) != key.size(1));
  };
}

Tensors host_inputs(HostCall& call, const Tensor& query, const Tensor& key,
                    const Tensor& value, const Tensor& mask) {
  return {call.host(query), call.host(key), call.host(value), call.host(mask)};
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt,
                           Tensor, Tensor, Tensor>;

Forward forward(const Tensor& query, const Tensor& key, const Tensor& value,
                const std::optional<Tensor>& bias, double dropout,
                bool is_causal, bool, std::optional<double> scale) {
  const Tensor mask = bias.value_or(Tensor());
  const auto tracked = [](const Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  const std::vector<bool> require_grad = {tracked(query), tracked(key),
                                          tracked(value), tracked(mask)};
  const bool keep = at::GradMode::is_enabled() &&
                    (require_grad[0] || require_grad[1] || require_grad[2]);
  auto made =
      allocate_outputs(choose_attention(query, key, value, bias, is_causal),
                       query, key, value, dropout, keep);
  if (phantom_device().exact()) {
    auto& generator = phantom_generator(default_generator());
    if (dropout > 0) {
      // The backward draws the same numbers, from the whole state.
      const Tensor state = generator.host().get_state();
      made.seed = at::empty(state.sizes(), query.options().dtype(at::kByte));
      made.seed.copy_(state);
    }
    const RandomScope random(default_generator());
    HostCall call;
    call.host(made.output)
        .copy_(host_forward(attention({dropout, is_causal, scale}),
                            host_inputs(call, query, key, value, mask),
                            require_grad));
  }
  time_kernel("attention", {query, key, value, made.output},
              attention_flops(query, key, value, is_causal, false), true);
  return {made.output, made.logsumexp, Tensor(),    Tensor(), query.size(2),
          key.size(2), made.seed,      made.offset, Tensor()};
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Backward backward(const Tensor& gradient, const Tensor& query,
                  const Tensor& key, const Tensor& value, const Tensor& mask,
                  std::array<bool, 4> wanted, const Tensor& output,
                  const Tensor&, const Tensor&, const Tensor&, SymInt, SymInt,
                  double dropout, bool is_causal, const Tensor& seed,
                  const Tensor& offset, std::optional<double> scale) {
  BackwardTemporaries held;
  copy_operands(kind_of(offset), gradient, output, held);
  const Tensors inputs = {query, key, value, mask};
  Tensors gradients(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    wanted[i] = wanted[i] && inputs[i].defined();
    if (wanted[i]) gradients[i] = at::empty_like(inputs[i]);
  }
  accumulate(kind_of(offset), query, key, value, held);
  if (phantom_device().exact()) {
    at::Generator replay = at::make_generator<PhantomGenerator>();
    HostCall call;
    if (dropout > 0) {
      phantom_generator(replay).host().set_state(call.host(seed));
    }
    const RandomScope random(replay);
    const Tensors found = host_backward(
        attention({dropout, is_causal, scale}),
        host_inputs(call, query, key, value, mask),
        std::vector<bool>(wanted.begin(), wanted.end()), call.host(gradient));
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (wanted[i]) call.host(gradients[i]).copy_(found[i]);
    }
  }
  time_kernel("attention backward",
              {query, key, value, output, gradient, gradients[0], gradients[1],
               gradients[2], gradients[3]},
              attention_flops(query, key, value, is_causal, true), true);
  return {gradients[0], gradients[1], gradients[2], gradients[3]};
}

// FlashAttention takes head dims that are multiples of 8: torch pads others,
// and autograd keeps the padded inputs.
Tensor padded(const Tensor& query, const Tensor& key, const Tensor& value,
              const std::optional<Tensor>& mask, double dropout, bool is_causal,
              std::optional<double> scale, bool enable_gqa) {
  constexpr std::int64_t kMultiple = 8;
  const std::int64_t head_dim = query.size(-1);
  const std::int64_t missing = (kMultiple - head_dim % kMultiple) % kMultiple;
  const bool flash =
      choose_attention(query, key, value, mask, is_causal) == Attention::flash;
  if (missing == 0 || !flash) {
    return at::native::scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  }
  const auto pad = [&](const Tensor& tensor) {
    return at::pad(tensor, {0, missing});
  };
  return at::native::scaled_dot_product_attention(
             pad(query), pad(key), pad(value), mask, dropout, is_causal,
             scale.value_or(1 / std::sqrt(static_cast<double>(head_dim))),
             enable_gqa)
      .slice(-1, 0, head_dim);
}

}  // namespace

void register_attention_padding(torch::Library& aten) {
  aten.impl("scaled_dot_product_attention", &padded);
}

void register_attention_kernels(torch::Library& aten) {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose);
  aten.impl("_scaled_dot_product_fused_attention_overrideable", &forward);
  aten.impl("_scaled_dot_product_fused_attention_overrideable_backward",
            &backward);
}

}  // namespace lowtide::phantom
