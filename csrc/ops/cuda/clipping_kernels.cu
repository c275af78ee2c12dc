#include "ops/cuda/clipping_kernels.cuh"

#include "ops/cuda/clipping_kernels.h"

namespace lowtide::ops::cuda {

std::int64_t num_groups(const std::vector<Transfer>& transfers) {
  return grids::groups(transfers);
}

void launch_square_sums(c10::ScalarType dtype,
                        const std::vector<Transfer>& transfers, double* sums) {
  grids::square_sums(dtype, transfers, sums);
}

void launch_norm(const double* sums, std::int64_t count, float* norm) {
  grids::norm(sums, count, norm);
}

void launch_scale(c10::ScalarType dtype, const std::vector<Transfer>& transfers,
                  const float* factor) {
  grids::scale(dtype, transfers, factor);
}

}  // namespace lowtide::ops::cuda
