// Kernels by name, and how many were launched.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace lowtide::dry {

// Work of a kernel on `stream`: nothing runs.
cudaError_t launch(cudaStream_t stream);
std::atomic<std::int64_t>& launches();

// How many blocks of `threads` fit a multiprocessor: two, whatever a kernel
// needs.  CUB sizes what it holds by it; registers are not looked up.
inline constexpr int kBlocksOfMultiprocessor = 2;

// Architecture of the code that a wheel of torch would load for the GPU.
int code_version();

}  // namespace lowtide::dry
