#include "ops/weight_gradient.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "base/check.h"

namespace lowtide::ops {
namespace {

bool may_sum_into(at::ScalarType self, at::ScalarType factors) {
  return self == factors || (self == at::kFloat && (factors == at::kBFloat16 ||
                                                    factors == at::kHalf));
}

// [Note: Reference of the weight gradient]
// The CPU has no GEMM from bf16 to fp32.  Where it adds, it adds a product of
// its own: fp32 gradients then have the bits of torch's accumulation, which one
// GEMM that starts from `self` would not have.
void on_cpu(at::Tensor self, const at::Tensor& grad_output,
            const at::Tensor& input, bool accumulate) {
  const auto dtype = self.scalar_type();
  const auto product = at::mm(grad_output.to(dtype).t(), input.to(dtype));
  if (accumulate) {
    self.add_(product);
  } else {
    self.copy_(product);
  }
}

}  // namespace

void require_weight_gradient_arguments(const at::Tensor& self,
                                       const at::Tensor& grad_output,
                                       const at::Tensor& input,
                                       bool /*accumulate*/) {
  const bool fits = self.dim() == 2 && grad_output.dim() == 2 &&
                    input.dim() == 2 &&
                    grad_output.sym_size(0) == input.sym_size(0) &&
                    grad_output.sym_size(1) == self.sym_size(0) &&
                    input.sym_size(1) == self.sym_size(1);
  if (!fits) {
    throw InvalidArgument(base::error_text(
        "torch.ops.lowtide.weight_gradient_",
        "self [out, in], grad_output [tokens, out] and input [tokens, in]",
        base::concat(self.sym_sizes(), ", ", grad_output.sym_sizes(), " and ",
                     input.sym_sizes()),
        "Flatten all dimensions but the last."));
  }
  if (grad_output.scalar_type() != input.scalar_type() ||
      !may_sum_into(self.scalar_type(), input.scalar_type())) {
    throw InvalidArgument(base::error_text(
        "torch.ops.lowtide.weight_gradient_",
        "one dtype, or an fp32 self of bf16 or fp16 factors",
        base::concat(c10::toString(self.scalar_type()), " of ",
                     c10::toString(grad_output.scalar_type()), " and ",
                     c10::toString(input.scalar_type())),
        "Cast the factors to one dtype."));
  }
}

void weight_gradient(const at::Tensor& self, const at::Tensor& grad_output,
                     const at::Tensor& input, bool accumulate) {
  require_weight_gradient_arguments(self, grad_output, input, accumulate);
  if (self.numel() == 0) return;
  if (self.is_cpu()) return on_cpu(self, grad_output, input, accumulate);
  at::Tensor out = self;
  const auto left = grad_output.t();
  const auto dtype = self.scalar_type();
  if (dtype == input.scalar_type()) {
    accumulate ? at::addmm_out(out, out, left, input)
               : at::mm_out(out, left, input);
  } else {
    accumulate ? at::addmm_out(out, out, left, input, dtype)
               : at::mm_out(out, left, input, dtype);
  }
}

}  // namespace lowtide::ops
