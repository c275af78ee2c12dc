// cuSPARSELt: what computes, whose stream no handle has, and how large a matrix
// is of which two of four values are kept.
#include <cuda_runtime_api.h>
#include <cusparseLt.h>

#include <cstdint>
#include <cstring>

#include "phantom/driver/capture.h"
#include "phantom/driver/timekeeper.h"

namespace lowtide::dry {
namespace {

cusparseStatus_t compute(const char* name, cudaStream_t stream) {
  timekeeper().product(stream, name);
  capture().enqueue(stream);
  return CUSPARSE_STATUS_SUCCESS;
}

std::size_t bytes_of(cudaDataType type) {
  switch (type) {
    case CUDA_R_32F:
      return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    default:
      return 1;
  }
}

}  // namespace
}  // namespace lowtide::dry

extern "C" {

// The descriptor is the caller's memory: what is kept of the matrix lies there,
// half of the values and two bits for each of these.
cusparseStatus_t cusparseLtStructuredDescriptorInit(
    const cusparseLtHandle_t*, cusparseLtMatDescriptor_t* matrix, int64_t rows,
    int64_t columns, int64_t, uint32_t, cudaDataType type, cusparseOrder_t,
    cusparseLtSparsity_t) {
  const auto kept = static_cast<std::size_t>(rows * columns) / 2;
  const std::size_t bytes = kept * lowtide::dry::bytes_of(type) + kept / 4;
  std::memcpy(matrix->data, &bytes, sizeof bytes);
  return CUSPARSE_STATUS_SUCCESS;
}
cusparseStatus_t cusparseLtSpMMACompressedSize2(
    const cusparseLtHandle_t*, const cusparseLtMatDescriptor_t* matrix,
    std::size_t* bytes, std::size_t* of_buffer) {
  std::memcpy(bytes, matrix->data, sizeof *bytes);
  *of_buffer = 0;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtMatmul(const cusparseLtHandle_t*,
                                  const cusparseLtMatmulPlan_t*, const void*,
                                  const void*, const void*, const void*,
                                  const void*, void*, void*,
                                  cudaStream_t* streams, int32_t count) {
  return lowtide::dry::compute("cusparseLtMatmul",
                               count > 0 ? streams[0] : nullptr);
}
cusparseStatus_t cusparseLtSpMMACompress2(const cusparseLtHandle_t*,
                                          const cusparseLtMatDescriptor_t*, int,
                                          cusparseOperation_t, const void*,
                                          void*, void*, cudaStream_t stream) {
  return lowtide::dry::compute("cusparseLtSpMMACompress2", stream);
}

}  // extern "C"
