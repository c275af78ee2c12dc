// The input and output lists of one collective, checked the same way for every
// implementation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/collectives.h"

namespace lowtide::comm {

struct TensorLists {
  std::vector<at::Tensor> outs;
  std::vector<at::Tensor> ins;

  bool empty() const { return outs.empty(); }
  // Of the larger side: outputs of an all-gather, inputs of a reduce-scatter.
  std::int64_t full_bytes(Kind kind) const;
};

// Copies the references to the tensors that have elements.  Lengths, sizes,
// contiguity and dtypes are invariants of the engine: a coalesced call of gloo
// silently corrupts mixed dtypes, and nothing else would notice.
TensorLists checked_lists(Kind kind, const std::vector<at::Tensor>& outs,
                          const std::vector<at::Tensor>& ins,
                          std::int64_t size);

}  // namespace lowtide::comm
