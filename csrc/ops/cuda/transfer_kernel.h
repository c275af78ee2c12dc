// The kernels that move the elements of many tensors in one launch.
//
// On the current stream of the current device; fp32, bf16 and fp16.  Pointers
// and extents travel in the kernel's arguments, so nothing is copied to the
// device first and a CUDA graph can capture it.
#pragma once

#include <c10/core/ScalarType.h>

#include <vector>

#include "ops/transfer.h"

namespace lowtide::ops::cuda {

void launch_copy(c10::ScalarType to, c10::ScalarType from,
                 const std::vector<Transfer>& transfers);
void launch_add(c10::ScalarType to, c10::ScalarType from,
                const std::vector<Transfer>& transfers);

}  // namespace lowtide::ops::cuda
