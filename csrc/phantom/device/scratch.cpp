#include "phantom/device/scratch.h"

#include <ATen/AccumulateType.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "phantom/device/cublas_workspace.h"
#include "phantom/device/device_allocator.h"

namespace lowtide::phantom {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

std::size_t bytes_of(std::int64_t numel, at::ScalarType dtype) {
  return static_cast<std::size_t>(numel) * c10::elementSize(dtype);
}

at::ScalarType accumulator(const at::Tensor& tensor) {
  return at::toAccumulateType(tensor.scalar_type(), /*is_cuda=*/true);
}

// What cuBLAS takes as it is: one of the last two dimensions is dense and the
// rows along it do not overlap.
bool is_gemm_operand(const at::Tensor& matrix) {
  if (matrix.is_non_overlapping_and_dense()) return true;
  const std::int64_t row = matrix.dim() - 2, column = matrix.dim() - 1;
  const auto leading = [&](std::int64_t dense, std::int64_t other) {
    return matrix.stride(dense) == 1 &&
           matrix.stride(other) >=
               std::max<std::int64_t>(1, matrix.size(dense));
  };
  return leading(row, column) || leading(column, row);
}

}  // namespace

void Scratch::take(std::size_t bytes) {
  if (bytes > 0) held_.push_back(device_allocator().allocate(bytes));
}

// mm(self, mat2), ...: what cuBLAS cannot take is copied, an expanded gradient
// for instance.
void gemm_scratch(Arguments arguments, Scratch& scratch) {
  hold_cublas_workspace();
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor()) continue;
    const at::Tensor& tensor = argument.toTensor();
    if (tensor.defined() && tensor.dim() >= 2 && !is_gemm_operand(tensor)) {
      scratch.take(bytes_of(tensor.numel(), tensor.scalar_type()));
    }
  }
}

// addmm(self, mat1, mat2), ...: self goes into the result, not to cuBLAS.
void gemm_add_scratch(Arguments arguments, Scratch& scratch) {
  gemm_scratch(arguments.slice(1), scratch);
}

// embedding_dense_backward(grad, indices, num_weights, padding_idx, by_freq):
// up to 3072 indices one kernel adds the rows; more are sorted and summed in
// segments of 10, in fp32, for as many segments as there can be.
void embedding_backward_scratch(Arguments arguments, Scratch& scratch) {
  constexpr std::int64_t kSmall = 3072, kRowsPerThread = 10;
  const at::Tensor& gradient = arguments[0].toTensor();
  const at::Tensor& indices = arguments[1].toTensor();
  const std::int64_t num_weights = arguments[2].toInt();
  const bool by_frequency = arguments[4].toBool();
  const std::int64_t count = indices.numel();
  if (count == 0 || (count <= kSmall && !by_frequency)) return;
  const std::int64_t segments = std::min(count, num_weights);
  const std::int64_t partial = count / kRowsPerThread + segments;
  const auto index = [&](std::int64_t numel) {
    scratch.take(bytes_of(numel, indices.scalar_type()));
  };
  index(count);  // sorted indices
  index(count);  // where they came from
  if (by_frequency) index(count);
  index(count);     // segment offsets
  index(segments);  // partial sums of each segment
  index(segments);  // and their offsets
  index(partial);
  scratch.take(bytes_of(partial * gradient.size(-1), accumulator(gradient)));
}

// _foreach_norm(self, ord, dtype): a partial result for each 64 Ki elements of
// the largest tensor, for every tensor.
void foreach_norm_scratch(Arguments arguments, Scratch& scratch) {
  constexpr std::int64_t kChunk = 65536;
  const auto tensors = arguments[0].toTensorVector();
  std::int64_t chunks = 0;
  for (const at::Tensor& tensor : tensors) {
    chunks = std::max(chunks, (tensor.numel() + kChunk - 1) / kChunk);
  }
  if (chunks == 0) return;
  scratch.take(bytes_of(chunks * static_cast<std::int64_t>(tensors.size()),
                        accumulator(tensors[0])));
}

// index_put(self, indices, values, accumulate): accumulating sorts the linear
// indices, with their order, and sums runs of equal ones.
void index_put_scratch(Arguments arguments, Scratch& scratch) {
  if (!arguments[3].toBool()) return;
  std::int64_t count = 1;
  for (const auto& index : arguments[1].toOptionalTensorVector()) {
    if (index && index->defined()) count = std::max(count, index->numel());
  }
  for (int buffer = 0; buffer < 4; ++buffer) {
    scratch.take(bytes_of(count, at::kLong));
  }
}

}  // namespace lowtide::phantom
