// Lists of tensors of one CUDA device, in one launch for up to 48 of them.
#pragma once

#include <ATen/core/Tensor.h>

namespace lowtide::ops::cuda {

// As those of ops/foreach.h; the lists are pairs and not empty.
void foreach_copy(at::TensorList to, at::TensorList from);
void foreach_add(at::TensorList to, at::TensorList from);

}  // namespace lowtide::ops::cuda
