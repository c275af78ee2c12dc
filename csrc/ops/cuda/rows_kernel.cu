#include "ops/cuda/rows_kernel.cuh"

namespace lowtide::ops::cuda {

void launch_add_rows(c10::ScalarType from, const RowAddition& rows) {
  grids::rows(from, rows);
}

}  // namespace lowtide::ops::cuda
