// Memory that CUDA's kernels hold besides their outputs.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <vector>

namespace lowtide::phantom {

// Temporaries of one call, given back when it ends.
class Scratch {
 public:
  // From the current stream's pool; nothing for 0 bytes.
  void take(std::size_t bytes);

 private:
  std::vector<c10::DataPtr> held_;
};

// Takes what a CUDA kernel would hold for a call with these arguments, given
// in the schema's order.
using ScratchRule = void (*)(c10::ArrayRef<c10::IValue> arguments,
                             Scratch& scratch);

// One for each family of operators that needs any; see operator_list.cpp.
void gemm_scratch(c10::ArrayRef<c10::IValue> arguments, Scratch& scratch);
void gemm_add_scratch(c10::ArrayRef<c10::IValue> arguments, Scratch& scratch);
void embedding_backward_scratch(c10::ArrayRef<c10::IValue> arguments,
                                Scratch& scratch);
void foreach_norm_scratch(c10::ArrayRef<c10::IValue> arguments,
                          Scratch& scratch);
void index_put_scratch(c10::ArrayRef<c10::IValue> arguments, Scratch& scratch);

}  // namespace lowtide::phantom
