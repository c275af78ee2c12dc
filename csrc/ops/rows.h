// The gradient of a lookup, added straight into the rows that were looked up.
#pragma once

#include <ATen/core/Tensor.h>

namespace lowtide::ops {

// Adds rows[i] to self[index[i]] for every i whose index is a row of `self`;
// other indices (of another block, of padding) are passed over.  Sums in
// `self`'s dtype.  torch.ops.lowtide.add_rows_.
//
// self: [n, width]; index: int64 [k]; rows: [k, width], any dtype.  On CUDA, an
// fp32 `self` with fp32, bf16 or fp16 rows takes one kernel of atomic adds: no
// temporaries, but equal indices in any order, so under
// torch.use_deterministic_algorithms it goes the way of everything else:
// at::index_add_.  Below autograd, on the current stream.  Throws
// InvalidArgument.
void add_rows(const at::Tensor& self, const at::Tensor& index,
              const at::Tensor& rows);

void require_rows_arguments(const at::Tensor& self, const at::Tensor& index,
                            const at::Tensor& rows);

}  // namespace lowtide::ops
