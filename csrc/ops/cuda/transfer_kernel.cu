#include "ops/cuda/batch.cuh"
#include "ops/cuda/transfer_kernel.h"

namespace lowtide::ops::cuda {
namespace {

template <typename To, typename From, typename Operation>
__global__ void __launch_bounds__(kTileThreads)
    transfer_kernel(const __grid_constant__ Batch batch) {
  for_each_tile(batch, [](const Transfer& transfer, std::int64_t tile) {
    run_tile<To, From>(transfer, tile, static_cast<int>(threadIdx.x),
                       Operation{});
  });
}

template <typename Operation>
void launch(c10::ScalarType to, c10::ScalarType from,
            const std::vector<Transfer>& transfers) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for_dtype(to, [&](auto to_value) {
    for_dtype(from, [&](auto from_value) {
      using To = decltype(to_value);
      using From = decltype(from_value);
      for_each_batch(transfers, [&](const Batch& batch, unsigned groups) {
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
