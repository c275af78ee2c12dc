#include <algorithm>

#include "phantom/cuda_kernels/rules.h"
#include "phantom/device/cublas_workspace.h"

namespace lowtide::phantom {
namespace {

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

// Anything else is copied, an expanded gradient for instance.
std::vector<c10::DataPtr> copied_operands(const CudaCall& call,
                                          std::size_t first) {
  std::vector<c10::DataPtr> copies;
  for (std::size_t i = first; i < call.arguments().size(); ++i) {
    if (!call.arguments()[i].isTensor()) continue;
    const at::Tensor& tensor = call.arguments()[i].toTensor();
    if (tensor.defined() && tensor.dim() >= 2 && !is_gemm_operand(tensor)) {
      copies.push_back(temporary(bytes_of(tensor)));
    }
  }
  return copies;
}

}  // namespace

void gemm(const CudaCall& call) {
  call.outputs();
  const auto copies = copied_operands(call, 0);
  hold_cublas_workspace();
}

// `self` goes into the result, not to cuBLAS.
void gemm_add(const CudaCall& call) {
  call.outputs();
  const auto copies = copied_operands(call, 1);
  hold_cublas_workspace();
}

// cuBLASLt adds a bias of one dimension.
void addmm(const CudaCall& call) {
  if (call.tensor("self").dim() != 1) return gemm_add(call);
  call.outputs();
  const auto copies = copied_operands(call, 1);
  hold_cublaslt_workspace();
}

}  // namespace lowtide::phantom
