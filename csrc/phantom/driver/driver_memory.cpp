// CUDA's driver: memory, and addresses apart from it (expandable segments).
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "phantom/driver/capture.h"
#include "phantom/driver/device.h"

namespace lowtide::dry {
namespace {

CUresult as_driver(cudaError_t error) { return static_cast<CUresult>(error); }

void* pointer_to(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

// Physical memory by handle.
struct Memory {
  int device = 0;
  std::size_t bytes = 0;
};

class Handles {
 public:
  static Handles& instance() {
    static Handles handles;
    return handles;
  }

  CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                  int index) {
    if (!device(index).memory.take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::lock_guard lock(mutex_);
    *handle = new_handle();
    all_[*handle] = {index, bytes};
    return CUDA_SUCCESS;
  }
  CUresult release(CUmemGenericAllocationHandle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = all_.find(handle);
    if (found == all_.end()) return CUDA_ERROR_INVALID_HANDLE;
    device(found->second.device).memory.give(found->second.bytes);
    all_.erase(found);
    return CUDA_SUCCESS;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<CUmemGenericAllocationHandle, Memory> all_;
};

}  // namespace
}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes,
                             std::size_t, CUdeviceptr, unsigned long long) {
  const auto placed = device(current_device()).reserve(bytes);
  if (!placed) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = *placed;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, std::size_t) {
  const auto index = device_of(pointer_to(address));
  const bool released = index && device(*index).release(address);
  return released ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemGetAllocationGranularity(std::size_t* bytes,
                                       const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = std::size_t{2} << 20;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                     const CUmemAllocationProp* property, unsigned long long) {
  const bool of_device = property->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  const int index = of_device ? property->location.id : current_device();
  return Handles::instance().create(handle, bytes, index);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return Handles::instance().release(handle);
}
CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  kept().forget(address, bytes);
  return CUDA_SUCCESS;
}
// Handles for other processes: the number is the same there, the memory is not
// counted again.
CUresult cuMemExportToShareableHandle(void* shared,
                                      CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType,
                                      unsigned long long) {
  std::memcpy(shared, &handle, sizeof(int));
  return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                        void*, CUmemAllocationHandleType) {
  return Handles::instance().create(handle, 0, current_device());
}

// NVLink's switch, which writes to the memory of several devices at once.
CUresult cuMulticastCreate(CUmemGenericAllocationHandle* handle,
                           const CUmulticastObjectProp*) {
  return Handles::instance().create(handle, 0, current_device());
}

CUresult cuMemAlloc(CUdeviceptr* address, std::size_t bytes) {
  void* pointer = nullptr;
  const auto error = cudaMalloc(&pointer, bytes);
  *address = reinterpret_cast<CUdeviceptr>(pointer);
  return as_driver(error);
}
CUresult cuMemFree(CUdeviceptr address) {
  return as_driver(cudaFree(pointer_to(address)));
}
CUresult cuMemGetInfo(std::size_t* free, std::size_t* total) {
  return as_driver(cudaMemGetInfo(free, total));
}
CUresult cuMemGetAddressRange(CUdeviceptr* first, std::size_t* bytes,
                              CUdeviceptr address) {
  const auto index = device_of(pointer_to(address));
  const auto range = index ? device(*index).around(address) : std::nullopt;
  if (!range) return CUDA_ERROR_NOT_FOUND;
  if (first) *first = range->first;
  if (bytes) *bytes = range->bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
  return as_driver(cudaHostAlloc(pointer, bytes, flags));
}
CUresult cuMemFreeHost(void* pointer) {
  return as_driver(cudaFreeHost(pointer));
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which,
                               CUdeviceptr address) {
  const auto index = device_of(pointer_to(address));
  const auto range = index ? device(*index).around(address) : std::nullopt;
  const auto tell = [value](bool known, auto found) {
    if (known) std::memcpy(value, &found, sizeof found);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  };
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return tell(index.has_value(), address);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return tell(index.has_value(), CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return tell(index.has_value(), index.value_or(0));
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return tell(range.has_value(), range ? range->first : 0);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return tell(range.has_value(), range ? range->bytes : 0);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t bytes) {
  return as_driver(
      cudaMemcpy(pointer_to(to), from, bytes, cudaMemcpyHostToDevice));
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t bytes) {
  return as_driver(
      cudaMemcpy(to, pointer_to(from), bytes, cudaMemcpyDeviceToHost));
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                           CUstream stream) {
  return as_driver(cudaMemcpyAsync(pointer_to(to), pointer_to(from), bytes,
                                   cudaMemcpyDeviceToDevice, stream));
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes,
                           CUstream stream) {
  return as_driver(cudaMemcpyAsync(pointer_to(to), from, bytes,
                                   cudaMemcpyHostToDevice, stream));
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t bytes,
                           CUstream stream) {
  return as_driver(cudaMemcpyAsync(to, pointer_to(from), bytes,
                                   cudaMemcpyDeviceToHost, stream));
}
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value,
                         std::size_t bytes, CUstream stream) {
  return as_driver(cudaMemsetAsync(pointer_to(address), value, bytes, stream));
}
CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value,
                          std::size_t count, CUstream stream) {
  const auto bytes = count * sizeof value;
  if (value == 0) {
    return as_driver(cudaMemsetAsync(pointer_to(address), 0, bytes, stream));
  }
  kept().forget(address, bytes);
  return as_driver(capture().enqueue(stream));
}

CUresult cuStreamSynchronize(CUstream stream) {
  return as_driver(cudaStreamSynchronize(stream));
}

}  // extern "C"
