#include "ops/cuda/transfer_kernel.cuh"

#include "ops/cuda/transfer_kernel.h"

namespace lowtide::ops::cuda {

void launch_copy(c10::ScalarType to, c10::ScalarType from,
                 const std::vector<Transfer>& transfers) {
  grids::transfers<Copy>(to, from, transfers);
}

void launch_add(c10::ScalarType to, c10::ScalarType from,
                const std::vector<Transfer>& transfers) {
  grids::transfers<Add>(to, from, transfers);
}

}  // namespace lowtide::ops::cuda
