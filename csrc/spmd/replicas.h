// Whether what should be equal on the ranks of an axis is: by hash.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/collectives.h"

namespace lowtide::spmd {

struct Difference {
  // The first value that differs, or -1 if the ranks have different numbers of
  // values.
  std::int64_t index = -1;
  std::vector<std::int64_t> by_rank;  // that value, or the number of values
};

// Compares `values` over the ranks of `axis`; all of them call it.  Tensors for
// the exchange are made on `device`.  Nothing is compared on a "fake" group.
// Blocks the host.
std::optional<Difference> first_difference(
    comm::Collectives& axis, const c10::Device& device,
    const std::vector<std::int64_t>& values);

}  // namespace lowtide::spmd
