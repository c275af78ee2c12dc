#include "ops/cuda/rows.h"

#include <c10/cuda/CUDAGuard.h>

#include "ops/cuda/rows_kernel.h"

namespace lowtide::ops::cuda {

bool takes_rows(const at::Tensor& self, const at::Tensor& index,
                const at::Tensor& rows) {
  const auto dtype = rows.scalar_type();
  return self.is_cuda() && index.device() == self.device() &&
         rows.device() == self.device() && self.scalar_type() == at::kFloat &&
         (dtype == at::kFloat || dtype == at::kBFloat16 ||
          dtype == at::kHalf) &&
         self.stride(1) == 1 && rows.stride(1) == 1;
}

void add_rows(const at::Tensor& self, const at::Tensor& index,
              const at::Tensor& rows) {
  if (self.numel() == 0 || rows.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(self.device());
  launch_add_rows(
      rows.scalar_type(),
      {self.mutable_data_ptr<float>(), rows.const_data_ptr(),
       index.const_data_ptr<std::int64_t>(), self.size(0), rows.size(0),
       self.size(1), self.stride(0), rows.stride(0), index.stride(0)});
}

}  // namespace lowtide::ops::cuda
