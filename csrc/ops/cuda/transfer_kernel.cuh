// Copies and adds, tile by tile: for the .cu of this name, and for the
// test that runs it on host threads.
#pragma once

#include "ops/cuda/tiles.cuh"

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

}  // namespace
}  // namespace lowtide::ops::cuda
