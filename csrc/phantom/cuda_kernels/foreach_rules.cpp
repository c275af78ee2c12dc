#include <ATen/ceil_div.h>

#include <algorithm>

#include "phantom/cuda_kernels/rules.h"

namespace lowtide::phantom {
namespace {

// A partial result for each 64 Ki elements of the largest tensor, for every
// tensor.
std::size_t partial_results(const std::vector<at::Tensor>& tensors,
                            at::ScalarType dtype) {
  constexpr std::int64_t kChunk = 65536;
  std::int64_t chunks = 0;
  for (const at::Tensor& tensor : tensors) {
    chunks = std::max(chunks, at::ceil_div(tensor.numel(), kChunk));
  }
  return bytes_of(chunks * static_cast<std::int64_t>(tensors.size()), dtype);
}

}  // namespace

void foreach_norm(const CudaCall& call) {
  const auto tensors = call["self"].toTensorVector();
  const auto partial = temporary(
      partial_results(tensors, accumulator_of(tensors.front().scalar_type())));
  call.outputs();
}

void foreach_max(const CudaCall& call) {
  const auto tensors = call["self"].toTensorVector();
  call.outputs();
  const auto partial =
      temporary(partial_results(tensors, tensors.front().scalar_type()));
}

}  // namespace lowtide::phantom
