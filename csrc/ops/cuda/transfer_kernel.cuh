// Copies and adds, tile by tile, and their grids: for the .cu of this name, and
// for the test that runs them on host threads.
#pragma once

#include "ops/cuda/launch.h"
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

namespace grids {

template <typename Operation>
void transfers(c10::ScalarType to, c10::ScalarType from,
               const std::vector<Transfer>& transfers) {
  const auto stream = current_stream();
  for_dtype(to, [&](auto to_value) {
    for_dtype(from, [&](auto from_value) {
      using To = decltype(to_value);
      using From = decltype(from_value);
      for_each_batch(transfers, resident_groups(),
                     [&](const Batch& batch, std::int64_t groups) {
                       launch(transfer_kernel<To, From, Operation>, groups,
                              kTileThreads, stream, batch);
                     });
    });
  });
}

}  // namespace grids
}  // namespace
}  // namespace lowtide::ops::cuda
