#pragma once

#include <ATen/core/Tensor.h>

namespace lowtide::ops::cuda {

// As those of ops/clipping.h; the lists are checked and not empty.
at::Tensor foreach_l2_norm(at::TensorList tensors);
void foreach_scale(at::TensorList tensors, const at::Tensor& factor);

}  // namespace lowtide::ops::cuda
