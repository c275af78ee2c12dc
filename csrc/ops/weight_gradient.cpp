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
void on_cpu(at::TensorList parts, const at::Tensor& grad_output,
            const at::Tensor& activation, bool accumulate) {
  const auto dtype = parts.front().scalar_type();
  const auto product = at::mm(grad_output.to(dtype).t(), activation.to(dtype));
  std::int64_t row = 0;
  for (at::Tensor part : parts) {
    const auto rows = product.narrow(0, row, part.size(0));
    row += part.size(0);
    if (accumulate) {
      part.add_(rows);
    } else {
      part.copy_(rows);
    }
  }
}

void on_device(at::Tensor self, const at::Tensor& grad_output,
               const at::Tensor& activation, bool accumulate) {
  const auto left = grad_output.t();
  const auto dtype = self.scalar_type();
  if (dtype == activation.scalar_type()) {
    accumulate ? at::addmm_out(self, self, left, activation)
               : at::mm_out(self, left, activation);
  } else {
    accumulate ? at::addmm_out(self, self, left, activation, dtype)
               : at::mm_out(self, left, activation, dtype);
  }
}

}  // namespace

void require_weight_gradient_arguments(const at::Tensor& self,
                                       const at::Tensor& grad_output,
                                       const at::Tensor& activation,
                                       bool /*accumulate*/) {
  const bool fits = self.dim() == 2 && grad_output.dim() == 2 &&
                    activation.dim() == 2 &&
                    grad_output.sym_size(0) == activation.sym_size(0) &&
                    grad_output.sym_size(1) == self.sym_size(0) &&
                    activation.sym_size(1) == self.sym_size(1);
  if (!fits) {
    throw InvalidArgument(base::error_text(
        "torch.ops.lowtide.weight_gradient_",
        "self [out, in], grad_output [tokens, out] and activation [tokens, in]",
        base::concat(self.sym_sizes(), ", ", grad_output.sym_sizes(), " and ",
                     activation.sym_sizes()),
        "Flatten all dimensions but the last."));
  }
  if (grad_output.scalar_type() != activation.scalar_type() ||
      !may_sum_into(self.scalar_type(), activation.scalar_type())) {
    throw InvalidArgument(base::error_text(
        "torch.ops.lowtide.weight_gradient_",
        "one dtype, or an fp32 self of bf16 or fp16 factors",
        base::concat(c10::toString(self.scalar_type()), " of ",
                     c10::toString(grad_output.scalar_type()), " and ",
                     c10::toString(activation.scalar_type())),
        "Cast the factors to one dtype."));
  }
}

void weight_gradient(const at::Tensor& self, const at::Tensor& grad_output,
                     const at::Tensor& activation, bool accumulate) {
  weight_gradient_in_parts(self, grad_output, activation, accumulate);
}

void weight_gradient_in_parts(at::TensorList parts,
                              const at::Tensor& grad_output,
                              const at::Tensor& activation, bool accumulate) {
  std::vector<at::Tensor> factors;  // of each part, of `grad_output`
  std::int64_t row = 0;
  std::int64_t numel = 0;
  for (const auto& part : parts) {
    factors.push_back(parts.size() == 1
                          ? grad_output
                          : grad_output.narrow(1, row, part.size(0)));
    require_weight_gradient_arguments(part, factors.back(), activation,
                                      accumulate);
    row += part.size(0);
    numel += part.numel();
  }
  if (numel == 0) return;
  if (parts.front().is_cpu()) {
    return on_cpu(parts, grad_output, activation, accumulate);
  }
  for (std::size_t k = 0; k < parts.size(); ++k) {
    on_device(parts[k], factors[k], activation, accumulate);
  }
}

}  // namespace lowtide::ops
