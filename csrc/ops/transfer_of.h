// Pairs of tensors as the transfers of a kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "ops/transfer.h"

namespace lowtide::ops {

// `to` and `from` have equal sizes.  None if it takes more than matrices of
// rows of consecutive elements.  Holds neither tensor.
std::optional<Transfer> transfer_of(const at::Tensor& to,
                                    const at::Tensor& from);

// Of the same two dtypes.
struct TransferList {
  c10::ScalarType to;
  c10::ScalarType from;
  std::vector<Transfer> transfers;
};

struct Transfers {
  std::vector<TransferList> lists;
  std::vector<std::size_t> others;  // pairs that no kernel takes
};

// What kernels take: fp32, bf16 or fp16, both on to[0]'s device.  Pairs without
// elements are left out.
Transfers transfers_of(at::TensorList to, at::TensorList from);

}  // namespace lowtide::ops
