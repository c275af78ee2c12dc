// Every launch of a kernel is a call of `launch`; beside it what launches
// share: the dtypes that kernels exist for, and how many groups of threads.
//
// Here are CUDA's forms, for nvcc.  A test that compiles kernels and their
// grids for the host includes its own forms of `launch`, `Stream`,
// `current_stream`, `resident_groups`, `add_at_once` and LOWTIDE_SHARED ahead
// of this file.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstdint>

#ifdef __CUDACC__
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <type_traits>

// `count` values that a group's threads share, where a kernel begins.
#define LOWTIDE_SHARED(type, name, count) __shared__ type name[count]
#endif

namespace lowtide::ops::cuda {

#ifdef __CUDACC__

using Stream = c10::cuda::CUDAStream;

// That of the current device.
inline Stream current_stream() { return c10::cuda::getCurrentCUDAStream(); }

// Groups of threads that fill the current device, each with several in flight.
inline std::int64_t resident_groups() {
  int device = 0;
  int processors = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(
      &processors, cudaDevAttrMultiProcessorCount, device));
  return std::int64_t{8} * processors;
}

// An atomicAdd of four values in one instruction; false where the GPU has none,
// an A100.
__device__ inline bool add_at_once(float4* to, float4 by) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(to, by);
  return true;
#else
  return false;
#endif
}

// Runs `kernel` on `stream`, 1 to 2^31 - 1 groups of `threads` threads.  Throws
// c10::Error where CUDA takes no such launch.
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), std::int64_t groups, int threads,
            const Stream& stream,
            const std::type_identity_t<Parameters>&... arguments) {
  kernel<<<static_cast<unsigned>(groups), static_cast<unsigned>(threads), 0,
           stream>>>(arguments...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

#endif

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
