// Dropout as CUDA keeps it, one kernel each way and a mask of booleans, with
// the CPU's values: there it multiplies by noise of 0 and 1 / (1 - p), rounded
// to the input's dtype.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>

#include <optional>
#include <tuple>

#include "phantom/device/device_clock.h"
#include "phantom/device/generator.h"
#include "phantom/device/host_call.h"
#include "phantom/device/kernels.h"
#include "phantom/device/random_scope.h"

namespace lowtide::phantom {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p,
                                   std::optional<bool> train) {
  HostCall call;
  const Tensor x = call.host(input);
  Tensor noise = at::ones_like(x);
  const bool drops = p != 0 && train.value_or(true);
  if (drops) {
    const RandomScope random(default_generator());
    noise.bernoulli_(1 - p);
  }
  const Tensor mask = call.phantom(noise.to(at::kBool));
  if (drops) noise.div_(1 - p);
  const Tensor result = call.phantom(x * noise);
  time_kernel("aten::native_dropout", {input, result, mask});
  return {result, mask};
}

Tensor dropout_backward(const Tensor& gradient, const Tensor& mask,
                        double scale) {
  HostCall call;
  const Tensor g = call.host(gradient);
  const Tensor noise = call.host(mask).to(g.scalar_type());
  const Tensor result =
      call.phantom(g * (scale == 0 ? noise : noise.div_(1 / scale)));
  time_kernel("aten::native_dropout_backward", {gradient, mask, result});
  return result;
}

}  // namespace

void register_dropout_kernels(torch::Library& aten) {
  aten.impl("native_dropout", &dropout);
  aten.impl("native_dropout_backward", &dropout_backward);
}

}  // namespace lowtide::phantom
