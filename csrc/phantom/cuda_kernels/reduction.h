// The buffers of torch's reduction kernel (ATen/native/cuda/Reduce.cuh): when a
// reduction is split over thread blocks, their partial results meet in global
// memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace lowtide::phantom {

struct ReductionBuffers {
  std::size_t partial_results = 0;
  std::size_t semaphores = 0;
};

struct ReductionKernel {
  std::size_t value_bytes;  // of what is accumulated
  int values_at_once = 4;   // a thread's (vt0)
};

// Of `self` over `dims`, over all without; nothing if one block does a result.
ReductionBuffers reduction_buffers(const at::Tensor& self,
                                   at::OptionalIntArrayRef dims,
                                   const ReductionKernel& kernel);

}  // namespace lowtide::phantom
