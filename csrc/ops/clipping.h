// What clipping by the total norm needs, in one pass over the gradients each
// and without a temporary of their size.
//
// fp32, bf16 and fp16 tensors of one device.  On CUDA a launch takes 48 tensors
// of a dtype; nothing waits; the same sum in every run.  Elsewhere the at::
// operators that torch.nn.utils.clip_grad_norm_ calls, with its bits for fp32.
// On the current stream, below autograd.  Throws InvalidArgument.
#pragma once

#include <ATen/core/Tensor.h>

namespace lowtide::ops {

// The L2 norm of all elements of all tensors: fp32, no dimensions, on their
// device.  torch.ops.lowtide.foreach_l2_norm.
at::Tensor foreach_l2_norm(at::TensorList tensors);

// Multiplies every element by `factor`, one number, in fp32.  A factor of 1
// costs no pass.  torch.ops.lowtide.foreach_scale_.
void foreach_scale(at::TensorList tensors, const at::Tensor& factor);

// What foreach_l2_norm takes; foreach_scale takes lists without tensors too.
void require_norm_arguments(at::TensorList tensors);
void require_scale_arguments(at::TensorList tensors, const at::Tensor& factor);

}  // namespace lowtide::ops
