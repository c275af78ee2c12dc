// Adds rows where an index says, and its grid: for the .cu of this name, and
// for the test that runs them on host threads.
#pragma once

#include <algorithm>

#include "ops/cuda/launch.h"
#include "ops/cuda/rows_kernel.h"
#include "ops/transfer.h"

namespace lowtide::ops::cuda {
namespace {

constexpr int kWidth = 4;  // 16 bytes of fp32

// Nothing reads the old value, so these become reductions in the L2 cache.
__device__ void add_vector(float* to, const Vector<float, kWidth>& by) {
  const auto four =
      make_float4(by.values[0], by.values[1], by.values[2], by.values[3]);
  if (add_at_once(reinterpret_cast<float4*>(to), four)) {
    return;
  }
  for (int k = 0; k < kWidth; ++k) {
    atomicAdd(to + k, by.values[k]);
  }
}

// One group of threads a row at a time.
template <typename From>
__global__ void __launch_bounds__(kTileThreads)
    add_rows_kernel(const RowAddition r) {
  for (std::int64_t i = blockIdx.x; i < r.num_from; i += gridDim.x) {
    const std::int64_t row = r.index[i * r.index_stride];
    if (row < 0 || row >= r.num_to) {
      continue;
    }
    float* const to = r.to + row * r.to_stride;
    const auto* const from =
        static_cast<const From*>(r.from) + i * r.from_stride;
    const bool vectors =
        aligned<float, kWidth>(to) && aligned<From, kWidth>(from);
    const std::int64_t body = vectors ? r.width / kWidth * kWidth : 0;
    for (std::int64_t c = std::int64_t{kWidth} * threadIdx.x; c < body;
         c += kWidth * kTileThreads) {
      const auto loaded = load<From, kWidth>(from + c, true);
      Vector<float, kWidth> by;
      for (int k = 0; k < kWidth; ++k) {
        by.values[k] = static_cast<float>(loaded.values[k]);
      }
      add_vector(to + c, by);
    }
    for (std::int64_t c = body + threadIdx.x; c < r.width; c += kTileThreads) {
      atomicAdd(to + c, static_cast<float>(from[c]));
    }
  }
}

namespace grids {

void rows(c10::ScalarType from, const RowAddition& rows) {
  const auto groups = std::min(rows.num_from, resident_groups());
  for_dtype(from, [&](auto value) {
    launch(add_rows_kernel<decltype(value)>, groups, kTileThreads,
           current_stream(), rows);
  });
}

}  // namespace grids
}  // namespace
}  // namespace lowtide::ops::cuda
