#include "ops/cuda/transfer_kernel.cuh"

#include "ops/cuda/launch.h"
#include "ops/cuda/transfer_kernel.h"

namespace lowtide::ops::cuda {
namespace {

template <typename Operation>
void launch(c10::ScalarType to, c10::ScalarType from,
            const std::vector<Transfer>& transfers) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for_dtype(to, [&](auto to_value) {
    for_dtype(from, [&](auto from_value) {
      using To = decltype(to_value);
      using From = decltype(from_value);
      for_each_batch(transfers, resident_groups(),
                     [&](const Batch& batch, unsigned groups) {
                       transfer_kernel<To, From, Operation>
                           <<<groups, kTileThreads, 0, stream>>>(batch);
                       C10_CUDA_KERNEL_LAUNCH_CHECK();
                     });
    });
  });
}

}  // namespace

void launch_copy(c10::ScalarType to, c10::ScalarType from,
                 const std::vector<Transfer>& transfers) {
  launch<Copy>(to, from, transfers);
}

void launch_add(c10::ScalarType to, c10::ScalarType from,
                const std::vector<Transfer>& transfers) {
  launch<Add>(to, from, transfers);
}

}  // namespace lowtide::ops::cuda
