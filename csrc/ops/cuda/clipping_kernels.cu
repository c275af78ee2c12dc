#include "ops/cuda/batch.cuh"
#include "ops/cuda/clipping_kernels.h"

namespace lowtide::ops::cuda {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The sum over the group's threads, in thread 0.
__device__ double sum_of_group(double value) {
  __shared__ double warps[kTileThreads / kWarp];
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

}  // namespace

std::int64_t num_groups(const std::vector<Transfer>& transfers) {
  std::int64_t groups = 0;
  for_each_batch(transfers,
                 [&](const Batch&, unsigned of_batch) { groups += of_batch; });
  return groups;
}

void launch_square_sums(c10::ScalarType dtype,
                        const std::vector<Transfer>& transfers, double* sums) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for_dtype(dtype, [&](auto value) {
    for_each_batch(transfers, [&](const Batch& batch, unsigned groups) {
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
    for_each_batch(transfers, [&](const Batch& batch, unsigned groups) {
      scale_kernel<decltype(value)>
          <<<groups, kTileThreads, 0, stream>>>(batch, factor);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

}  // namespace lowtide::ops::cuda
