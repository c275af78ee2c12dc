// The weight gradient of a linear layer, written or added straight into where
// it is to be: no temporary of the weight's size.
#pragma once

#include <ATen/core/Tensor.h>

namespace lowtide::ops {

// self = grad_output^T activation, or self += that if `accumulate`:
// torch.ops.lowtide.weight_gradient_.
//
// self: [out, in] with consecutive elements in a row; grad_output:
// [tokens, out]; activation: [tokens, in], any strides.  Of one dtype, or an
// fp32 `self` of bf16 or fp16 factors, whose products are summed and stored in
// fp32, rounded nowhere.  One GEMM on CUDA (aten::mm.dtype_out,
// aten::addmm.dtype_out); the CPU adds the whole product to `self`, as the sum
// of two gradients is, in a temporary.  Below autograd, on the current stream.
// Throws InvalidArgument.
void weight_gradient(const at::Tensor& self, const at::Tensor& grad_output,
                     const at::Tensor& activation, bool accumulate);

// The same for a `self` whose rows lie in several matrices, `parts`, one after
// the other: a GEMM for each on CUDA, one on the CPU, where a row's bits may
// depend on how many there are.
void weight_gradient_in_parts(at::TensorList parts,
                              const at::Tensor& grad_output,
                              const at::Tensor& activation, bool accumulate);

void require_weight_gradient_arguments(const at::Tensor& self,
                                       const at::Tensor& grad_output,
                                       const at::Tensor& activation,
                                       bool accumulate);

}  // namespace lowtide::ops
