// How the groups of threads of a launch share a batch's tiles.
#pragma once

#include "ops/cuda/batch.h"

namespace lowtide::ops::cuda {

// Calls work(transfer, tile) for the tiles of this group of threads.
template <typename Work>
__device__ void for_each_tile(const Batch& batch, const Work& work) {
  int which = 0;
  const std::int64_t tiles = batch.first_tile[batch.count];
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    while (batch.first_tile[which + 1] <= tile) {
      ++which;
    }
    work(batch.transfers[which], tile - batch.first_tile[which]);
  }
}

}  // namespace lowtide::ops::cuda
