// Norm and scaling, and their grids: for the .cu of this name, and for the test
// that runs them on host threads.
#pragma once

#include "ops/cuda/launch.h"
#include "ops/cuda/tiles.cuh"

namespace lowtide::ops::cuda {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The sum over the group's threads, in thread 0.
__device__ double sum_of_group(double value) {
  LOWTIDE_SHARED(double, warps, kTileThreads / kWarp);
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value += __shfl_down_sync(kAllLanes, value, lanes);
  }
  if (threadIdx.x % kWarp == 0) {
    warps[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kTileThreads / kWarp; ++warp) {
      value += warps[warp];
    }
  }
  return value;
}

// fp32 within a tile, 16 elements a thread; fp64 between tiles.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    square_sums_kernel(const __grid_constant__ Batch batch, double* sums) {
  double total = 0;
  for_each_tile(batch, [&](const Transfer& transfer, std::int64_t tile) {
    float sum = 0;
    run_tile<T, T>(transfer, tile, static_cast<int>(threadIdx.x),
                   SquareSum{&sum});
    total += sum;
  });
  total = sum_of_group(total);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = total;
  }
}

__global__ void __launch_bounds__(kTileThreads)
    norm_kernel(const double* sums, std::int64_t count, float* norm) {
  double total = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kTileThreads) {
    total += sums[i];
  }
  total = sum_of_group(total);
  if (threadIdx.x == 0) {
    *norm = static_cast<float>(sqrt(total));
  }
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    scale_kernel(const __grid_constant__ Batch batch, const float* factor) {
  const float by = *factor;
  if (by == 1.0f) {
    return;
  }
  for_each_tile(batch, [&](const Transfer& transfer, std::int64_t tile) {
    run_tile<T, T>(transfer, tile, static_cast<int>(threadIdx.x), Scale{by});
  });
}

namespace grids {

std::int64_t groups(const std::vector<Transfer>& transfers) {
  std::int64_t all = 0;
  for_each_batch(transfers, resident_groups(),
                 [&](const Batch&, std::int64_t groups) { all += groups; });
  return all;
}

void square_sums(c10::ScalarType dtype, const std::vector<Transfer>& transfers,
                 double* sums) {
  const auto stream = current_stream();
  for_dtype(dtype, [&](auto value) {
    for_each_batch(transfers, resident_groups(),
                   [&](const Batch& batch, std::int64_t groups) {
                     launch(square_sums_kernel<decltype(value)>, groups,
                            kTileThreads, stream, batch, sums);
                     sums += groups;
                   });
  });
}

void norm(const double* sums, std::int64_t count, float* norm) {
  launch(norm_kernel, 1, kTileThreads, current_stream(), sums, count, norm);
}

void scale(c10::ScalarType dtype, const std::vector<Transfer>& transfers,
           const float* factor) {
  const auto stream = current_stream();
  for_dtype(dtype, [&](auto value) {
    for_each_batch(transfers, resident_groups(),
                   [&](const Batch& batch, std::int64_t groups) {
                     launch(scale_kernel<decltype(value)>, groups, kTileThreads,
                            stream, batch, factor);
                   });
  });
}

}  // namespace grids
}  // namespace
}  // namespace lowtide::ops::cuda
