// The kernels of clipping.  On the current stream of the current device.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "ops/transfer.h"

namespace lowtide::ops::cuda {

// How many groups of threads read these, each with a sum of its own.
std::int64_t num_groups(const std::vector<Transfer>& transfers);
// Writes num_groups sums of squares.
void launch_square_sums(c10::ScalarType dtype,
                        const std::vector<Transfer>& transfers, double* sums);
// The root of their sum, added up in the same order every time.
void launch_norm(const double* sums, std::int64_t count, float* norm);
// `factor` is on the device.
void launch_scale(c10::ScalarType dtype, const std::vector<Transfer>& transfers,
                  const float* factor);

}  // namespace lowtide::ops::cuda
