// Products of bf16 or fp16 into fp32 results, which CUDA has and the CPU lacks:
// computed here in fp32.
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "phantom/device/cublas_workspace.h"
#include "phantom/device/device_clock.h"
#include "phantom/device/host_call.h"
#include "phantom/device/kernels.h"

namespace lowtide::phantom {
namespace {

using at::ScalarType;
using at::Tensor;

void time_product(const Tensor& a, const Tensor& b, const Tensor& result) {
  time_kernel(
      "aten::mm", {a, b, result},
      2 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1)));
}

// `make(a, b)` gives the host's result for the two operands in `dtype`.
template <typename Make>
Tensor product(HostCall& call, const Tensor& a, const Tensor& b,
               ScalarType dtype, Make make) {
  hold_cublas_workspace();
  return make(call.host(a).to(dtype), call.host(b).to(dtype));
}

Tensor wide_mm(const Tensor& a, const Tensor& b, ScalarType dtype) {
  HostCall call;
  Tensor out = call.phantom(
      product(call, a, b, dtype, [](auto x, auto y) { return at::mm(x, y); }));
  time_product(a, b, out);
  return out;
}

Tensor& wide_mm_out(const Tensor& a, const Tensor& b, ScalarType dtype,
                    Tensor& out) {
  HostCall call;
  const auto result =
      product(call, a, b, dtype, [](auto x, auto y) { return at::mm(x, y); });
  call.host(out).copy_(result);
  time_product(a, b, out);
  return out;
}

Tensor wide_addmm(const Tensor& self, const Tensor& a, const Tensor& b,
                  ScalarType dtype, const at::Scalar& beta,
                  const at::Scalar& alpha) {
  HostCall call;
  Tensor out = call.phantom(product(call, a, b, dtype, [&](auto x, auto y) {
    return at::addmm(call.host(self).to(dtype), x, y, beta, alpha);
  }));
  time_product(a, b, out);
  return out;
}

Tensor& wide_addmm_out(const Tensor& self, const Tensor& a, const Tensor& b,
                       ScalarType dtype, const at::Scalar& beta,
                       const at::Scalar& alpha, Tensor& out) {
  HostCall call;
  const auto result = product(call, a, b, dtype, [&](auto x, auto y) {
    return at::addmm(call.host(self).to(dtype), x, y, beta, alpha);
  });
  call.host(out).copy_(result);
  time_product(a, b, out);
  return out;
}

}  // namespace

void register_wide_gemm_kernels(torch::Library& aten) {
  aten.impl("mm.dtype", &wide_mm);
  aten.impl("mm.dtype_out", &wide_mm_out);
  aten.impl("addmm.dtype", &wide_addmm);
  aten.impl("addmm.dtype_out", &wide_addmm_out);
}

}  // namespace lowtide::phantom
