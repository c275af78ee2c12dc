// What launches of kernels share: the dtypes they exist for, and how many
// groups of threads.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace lowtide::ops::cuda {

// Groups of threads that fill the current device, each with several in flight.
inline std::int64_t resident_groups() {
  int device = 0;
  int processors = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(
      &processors, cudaDevAttrMultiProcessorCount, device));
  return std::int64_t{8} * processors;
}

// Calls with(value of the C++ type).
template <typename With>
void for_dtype(c10::ScalarType dtype, With with) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return with(float{});
    case c10::ScalarType::BFloat16:
      return with(c10::BFloat16{});
    case c10::ScalarType::Half:
      return with(c10::Half{});
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel for ", dtype);
  }
}

}  // namespace lowtide::ops::cuda
