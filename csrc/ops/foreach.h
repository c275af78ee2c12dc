// Operators on lists of tensors: on CUDA one kernel launch for a list, anywhere
// else the at:: operators that stand beside each.
//
// Lists have equal lengths, pairs equal sizes and one device.  Any strides; a
// CUDA kernel takes fp32, bf16 and fp16 in and out, as long as both tensors
// are, dimensions merged, matrices of rows of consecutive elements; the other
// pairs take the at:: operator.  No temporaries, no waiting, on the current
// stream.  Below autograd: neither recorded nor seen by version counters,
// unless called as torch.ops.lowtide.*.  Throws InvalidArgument.
#pragma once

#include <ATen/core/Tensor.h>

namespace lowtide::ops {

// to[i].copy_(from[i]): torch.ops.lowtide.foreach_copy_.
void foreach_copy(at::TensorList to, at::TensorList from);
// to[i].add_(from[i]), summed in fp32: torch.ops.lowtide.foreach_add_.
void foreach_add(at::TensorList to, at::TensorList from);

// Throws unless the lists are pairs of equal sizes, which may be symbols.
// `name` is the operator's.
void require_pairs(const char* name, at::TensorList to, at::TensorList from);

}  // namespace lowtide::ops
