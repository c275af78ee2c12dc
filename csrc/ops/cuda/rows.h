#pragma once

#include <ATen/core/Tensor.h>

namespace lowtide::ops::cuda {

// Whether the kernel takes them: an fp32 `self` and fp32, bf16 or fp16 rows,
// both with consecutive elements in a row, on one CUDA device.
bool takes_rows(const at::Tensor& self, const at::Tensor& index,
                const at::Tensor& rows);
// As that of ops/rows.h.
void add_rows(const at::Tensor& self, const at::Tensor& index,
              const at::Tensor& rows);

}  // namespace lowtide::ops::cuda
