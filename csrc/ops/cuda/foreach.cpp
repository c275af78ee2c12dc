#include "ops/cuda/foreach.h"

#include <c10/cuda/CUDAGuard.h>

#include "ops/cuda/transfer_kernel.h"
#include "ops/transfer_of.h"

namespace lowtide::ops::cuda {

void foreach_copy(at::TensorList to, at::TensorList from) {
  const c10::cuda::CUDAGuard guard(to[0].device());
  const auto all = transfers_of(to, from);
  for (const auto& list : all.lists) {
    launch_copy(list.to, list.from, list.transfers);
  }
  for (const auto i : all.others) {
    to[i].copy_(from[i]);
  }
}

void foreach_add(at::TensorList to, at::TensorList from) {
  const c10::cuda::CUDAGuard guard(to[0].device());
  const auto all = transfers_of(to, from);
  for (const auto& list : all.lists) {
    launch_add(list.to, list.from, list.transfers);
  }
  for (const auto i : all.others) {
    to[i].add_(from[i]);
  }
}

}  // namespace lowtide::ops::cuda
