// The part of the CUDA stub (cuda_stub.cpp) that lets whole programs run dry:
// torch's CUDA operators allocate what they always do and compute nothing.
//
// What it pretends:
//   - an H100's limits, and kernels of 1024 threads;
//   - kernels, copies to the device and fills succeed and do nothing, so what
//     is copied from the device is zero, and so is what was reduced over it;
//   - cuBLAS has an algorithm without workspace for every product;
//   - pinned memory is ordinary memory.
// cuDNN is not part of it: programs switch its attention off.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

#include "cuda_stub_capture.h"

namespace {

using cuda_stub::Capture;

bool on_device(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  return address >= std::uintptr_t{1} << 44 && address < std::uintptr_t{1}
                                                             << 46;
}

// A handle of its own, never looked into: torch keeps one workspace for each.
template <typename Handle>
cublasStatus_t create(Handle* handle) {
  static std::atomic<std::uintptr_t> last = 0;
  *handle = reinterpret_cast<Handle>(++last);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<cudaDeviceAttr, int> kH100 = {
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 << 10},
  };
  const auto found = kH100.find(attribute);
  *value = found == kH100.end() ? 0 : found->second;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                     const void* pointer) {
  *attributes = {};
  attributes->type =
      on_device(pointer) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

// Kernels.

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void*) {
  *kernel = reinterpret_cast<cudaKernel_t>(std::uintptr_t{16});
  return cudaSuccess;
}
static std::atomic<std::int64_t> launches = 0;
// For programs that count them.
std::int64_t cuda_stub_launches() { return launches; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, std::size_t,
                               cudaStream_t stream) {
  ++launches;
  return Capture::instance().enqueue(stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*,
                                void**) {
  return Capture::instance().enqueue(config->stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, std::size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  *address = reinterpret_cast<void*>(std::uintptr_t{1} << 45);
  return cudaSuccess;
}

// Bytes.

void cuda_stub_count_wait();

static cudaError_t copy(void* to, const void* from, std::size_t bytes) {
  if (on_device(to)) return cudaSuccess;
  if (on_device(from)) {
    std::memset(to, 0, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes,
                       cudaMemcpyKind) {
  cuda_stub_count_wait();
  if (const auto refused = Capture::instance().host_waits()) return refused;
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                            cudaMemcpyKind, cudaStream_t stream) {
  Capture::instance().enqueue(stream);
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, std::size_t,
                               std::size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
cudaError_t cudaMemset(void*, int, std::size_t) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, std::size_t, cudaStream_t stream) {
  return Capture::instance().enqueue(stream);
}
cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned) {
  if (const auto refused = Capture::instance().unsafe()) return refused;
  constexpr std::size_t kPage = 4096;
  *address = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  std::free(address);
  return cudaSuccess;
}

// Streams and events beyond the allocator's needs.

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                     unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t,
                                 cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

// cuBLAS: what has results.  support/cuda_stub.py lets all else succeed.

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  return create(handle);
}
cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
  *mode = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t,
                                       cublasPointerMode_t* mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}
std::size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description,
                                        cublasComputeType_t, cudaDataType_t) {
  return create(description);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(
    cublasLtMatmulPreference_t* preference) {
  return create(preference);
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout,
                                          cudaDataType, std::uint64_t,
                                          std::uint64_t, std::int64_t) {
  return create(layout);
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t* results,
    int* count) {
  results[0] = {};
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
