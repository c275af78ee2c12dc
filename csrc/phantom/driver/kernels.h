// Kernels: what they are called, how they are launched, how many were.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace lowtide::dry {

struct Launch {
  const char* name = "";    // as its code has it; "" if that is not known
  std::int64_t blocks = 0;  // of its grid
};
inline std::int64_t blocks_of(dim3 grid) {
  return std::int64_t{grid.x} * grid.y * grid.z;
}

// Work of a kernel on `stream`: nothing runs.
cudaError_t launch(cudaStream_t stream, const Launch& launched);
std::atomic<std::int64_t>& launches();

// How many blocks of `threads` fit a multiprocessor: two, whatever a kernel
// needs.  CUB sizes what it holds by it; registers are not looked up.
inline constexpr int kBlocksOfMultiprocessor = 2;

// Architecture of the code that a wheel of torch would load for the GPU.
int code_version();

}  // namespace lowtide::dry
