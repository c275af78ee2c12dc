// What the kernels on lists of tensors share: their arguments and their launch.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <vector>

#include "ops/transfer.h"

namespace lowtide::ops::cuda {

// The arguments of a kernel take 4 KiB at most.
inline constexpr int kMostTransfers = 48;

struct Batch {
  Transfer transfers[kMostTransfers];
  std::int64_t first_tile[kMostTransfers + 1];
  int count;
};
static_assert(sizeof(Batch) <= 4000);

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

// Groups of threads that fill the current device, each with several in flight.
inline std::int64_t resident_groups() {
  int device = 0;
  int processors = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(
      &processors, cudaDevAttrMultiProcessorCount, device));
  return std::int64_t{8} * processors;
}

// Calls launch(batch, groups) for every kMostTransfers of them.
template <typename Launch>
void for_each_batch(const std::vector<Transfer>& transfers, Launch launch) {
  const auto most = resident_groups();
  for (std::size_t begin = 0; begin < transfers.size();
       begin += kMostTransfers) {
    Batch batch{};
    batch.count = static_cast<int>(
        std::min<std::size_t>(kMostTransfers, transfers.size() - begin));
    for (int i = 0; i < batch.count; ++i) {
      batch.transfers[i] = transfers[begin + static_cast<std::size_t>(i)];
      batch.first_tile[i + 1] =
          batch.first_tile[i] + num_tiles(batch.transfers[i]);
    }
    const auto tiles = batch.first_tile[batch.count];
    launch(batch, static_cast<unsigned>(std::min(tiles, most)));
  }
}

// Calls with(value of the C++ type).
template <typename With>
void for_dtype(c10::ScalarType dtype, With with) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return with(float{});
    case c10::ScalarType::BFloat16:
      return with(c10::BFloat16{});
    case c10::ScalarType::Half:
      return with(c10::Half{});
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel for ", dtype);
  }
}

}  // namespace lowtide::ops::cuda
