#include "ops/cuda/rows_kernel.cuh"

#include <algorithm>

#include "ops/cuda/launch.h"

namespace lowtide::ops::cuda {

void launch_add_rows(c10::ScalarType from, const RowAddition& rows) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto groups =
      static_cast<unsigned>(std::min(rows.num_from, resident_groups()));
  for_dtype(from, [&](auto value) {
    add_rows_kernel<decltype(value)><<<groups, kTileThreads, 0, stream>>>(rows);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace lowtide::ops::cuda
