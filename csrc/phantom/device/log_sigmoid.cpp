// log_sigmoid's backward has no use for a buffer on CUDA; the CPU's keeps one.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log_sigmoid_backward.h>
#include <ATen/ops/log_sigmoid_forward.h>

#include <tuple>

#include "phantom/device/device_clock.h"
#include "phantom/device/host_call.h"
#include "phantom/device/kernels.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> log_sigmoid_forward(const Tensor& self) {
  HostCall call;
  const auto [output, buffer] = at::log_sigmoid_forward(call.host(self));
  if (phantom_device().exact()) {
    return {call.phantom(output), call.phantom(buffer)};
  }
  const Tensor result = call.phantom(output);
  time_kernel("aten::log_sigmoid_forward", {self, result});
  return {result, at::empty({0}, self.options())};
}

Tensor log_sigmoid_backward(const Tensor& gradient, const Tensor& self,
                            const Tensor& buffer) {
  HostCall call;
  const Tensor result = call.phantom(at::log_sigmoid_backward(
      call.host(gradient), call.host(self), call.host(buffer)));
  time_kernel("aten::log_sigmoid_backward", {gradient, self, result});
  return result;
}

}  // namespace

void register_log_sigmoid(torch::Library& aten) {
  aten.impl("log_sigmoid_forward", &log_sigmoid_forward);
  aten.impl("log_sigmoid_backward", &log_sigmoid_backward);
}

}  // namespace lowtide::phantom
