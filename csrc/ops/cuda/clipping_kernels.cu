#include "ops/cuda/clipping_kernels.cuh"

#include "ops/cuda/clipping_kernels.h"
#include "ops/cuda/launch.h"

namespace lowtide::ops::cuda {

std::int64_t num_groups(const std::vector<Transfer>& transfers) {
  std::int64_t groups = 0;
  for_each_batch(transfers, resident_groups(),
                 [&](const Batch&, unsigned of_batch) { groups += of_batch; });
  return groups;
}

void launch_square_sums(c10::ScalarType dtype,
                        const std::vector<Transfer>& transfers, double* sums) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for_dtype(dtype, [&](auto value) {
    for_each_batch(transfers, resident_groups(),
                   [&](const Batch& batch, unsigned groups) {
                     square_sums_kernel<decltype(value)>
                         <<<groups, kTileThreads, 0, stream>>>(batch, sums);
                     C10_CUDA_KERNEL_LAUNCH_CHECK();
                     sums += groups;
                   });
  });
}

void launch_norm(const double* sums, std::int64_t count, float* norm) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  norm_kernel<<<1, kTileThreads, 0, stream>>>(sums, count, norm);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void launch_scale(c10::ScalarType dtype, const std::vector<Transfer>& transfers,
                  const float* factor) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for_dtype(dtype, [&](auto value) {
    for_each_batch(transfers, resident_groups(),
                   [&](const Batch& batch, unsigned groups) {
                     scale_kernel<decltype(value)>
                         <<<groups, kTileThreads, 0, stream>>>(batch, factor);
                     C10_CUDA_KERNEL_LAUNCH_CHECK();
                   });
  });
}

}  // namespace lowtide::ops::cuda
