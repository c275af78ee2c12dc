#include "ops/cuda/clipping.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include <vector>

#include "ops/cuda/clipping_kernels.h"
#include "ops/transfer_of.h"

namespace lowtide::ops::cuda {

at::Tensor foreach_l2_norm(at::TensorList tensors) {
  const c10::cuda::CUDAGuard guard(tensors[0].device());
  auto readable = tensors.vec();
  for (const auto i : transfers_of(tensors, tensors).others) {
    readable[i] = tensors[i].contiguous();
  }
  const auto all = transfers_of(readable, readable);
  std::int64_t groups = 0;
  for (const auto& list : all.lists) {
    groups += num_groups(list.transfers);
  }
  const auto partial =
      at::empty({groups}, tensors[0].options().dtype(at::kDouble));
  auto* sums = partial.mutable_data_ptr<double>();
  for (const auto& list : all.lists) {
    launch_square_sums(list.from, list.transfers, sums);
    sums += num_groups(list.transfers);
  }
  auto norm = at::empty({}, tensors[0].options().dtype(at::kFloat));
  launch_norm(partial.const_data_ptr<double>(), groups,
              norm.mutable_data_ptr<float>());
  return norm;
}

void foreach_scale(at::TensorList tensors, const at::Tensor& factor) {
  const c10::cuda::CUDAGuard guard(tensors[0].device());
  const auto here = factor.to(tensors[0].device(), at::kFloat);
  const auto all = transfers_of(tensors, tensors);
  for (const auto& list : all.lists) {
    launch_scale(list.to, list.transfers, here.const_data_ptr<float>());
  }
  for (const auto i : all.others) {
    tensors[i].mul_(here);
  }
}

}  // namespace lowtide::ops::cuda
