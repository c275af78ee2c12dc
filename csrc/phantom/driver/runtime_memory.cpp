// CUDA's runtime: memory of the devices and of the host, copies.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "phantom/driver/capture.h"
#include "phantom/driver/device.h"
#include "phantom/driver/pinned_memory.h"
#include "phantom/driver/timekeeper.h"

namespace lowtide::dry {
namespace {

Address address_of(const void* pointer) {
  return reinterpret_cast<Address>(pointer);
}

cudaError_t allocate(void** pointer, std::size_t bytes) {
  if (bytes == 0) {
    *pointer = nullptr;
    return cudaSuccess;
  }
  const auto address = device(current_device()).allocate(bytes);
  if (!address) return cudaErrorMemoryAllocation;
  *pointer = reinterpret_cast<void*>(*address);
  return cudaSuccess;
}

cudaError_t give_back(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const auto index = device_of(pointer);
  const bool freed = index && device(*index).free(address_of(pointer));
  return freed ? cudaSuccess : cudaErrorInvalidValue;
}

void tell_of_copy(const void* to, const void* from, std::size_t bytes,
                  cudaStream_t stream) {
  if (!timekeeper().runs()) return;
  const bool to_device = device_of(to).has_value();
  const bool from_device = device_of(from).has_value();
  if (to_device && from_device) {
    timekeeper().move(stream, "copy", 2 * static_cast<double>(bytes));
  } else if (to_device || from_device) {
    timekeeper().transfer(
        stream,
        to_device ? phantom::Direction::to_device : phantom::Direction::to_host,
        static_cast<double>(bytes));
  }
}

cudaError_t enqueue_copy(void* to, const void* from, std::size_t bytes,
                         cudaStream_t stream) {
  tell_of_copy(to, from, bytes, stream);
  capture().enqueue(stream);
  copy_bytes(to, from, bytes);
  return cudaSuccess;
}

// A copy on the default stream that the host waits for.
cudaError_t wait_for_copy(const void* to, const void* from, std::size_t bytes) {
  ++host_waits();
  if (const auto refused = capture().host_waits()) return refused;
  tell_of_copy(to, from, bytes, nullptr);
  timekeeper().synchronize(nullptr);
  return cudaSuccess;
}

void copy_rows(void* to, std::size_t to_pitch, const void* from,
               std::size_t from_pitch, std::size_t width, std::size_t height) {
  for (std::size_t row = 0; row < height; ++row) {
    copy_bytes(static_cast<char*>(to) + row * to_pitch,
               static_cast<const char*>(from) + row * from_pitch, width);
  }
}

void set_bytes(void* pointer, int value, std::size_t bytes) {
  if (device_of(pointer)) {
    kept().fill(address_of(pointer), value, bytes);
  } else {
    std::memset(pointer, value, bytes);
  }
}

}  // namespace
}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  if (const auto refused = capture().unsafe()) return refused;
  return allocate(pointer, bytes);
}
cudaError_t cudaMallocManaged(void** pointer, std::size_t bytes, unsigned) {
  return cudaMalloc(pointer, bytes);
}
cudaError_t cudaFree(void* pointer) { return give_back(pointer); }
cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t) {
  return allocate(pointer, bytes);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  return give_back(pointer);
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const auto& memory = device(current_device()).memory;
  *total = settings().memory;
  *free = *total - std::min(*total, memory.now());
  return cudaSuccess;
}

// Pools of the driver's allocator: one a device, whose limits do nothing.
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int index) {
  *pool =
      reinterpret_cast<cudaMemPool_t>(static_cast<std::uintptr_t>(index) + 1);
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which,
                                    void* value) {
  const auto index = static_cast<int>(reinterpret_cast<std::uintptr_t>(pool));
  const auto& memory = device(index - 1).memory;
  std::uint64_t number = 0;
  if (which == cudaMemPoolAttrReservedMemCurrent ||
      which == cudaMemPoolAttrUsedMemCurrent) {
    number = memory.now();
  } else if (which == cudaMemPoolAttrReservedMemHigh ||
             which == cudaMemPoolAttrUsedMemHigh) {
    number = memory.peak();
  }
  std::memcpy(value, &number, sizeof number);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  if (const auto refused = capture().unsafe()) return refused;
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  *pointer = pinned_memory().allocate(bytes);
  if (*pointer == nullptr) return cudaErrorMemoryAllocation;
  pinned().take(bytes);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) {
  return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}
cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const auto bytes = pinned_memory().remove(pointer);
  pinned().give(bytes);
  return bytes == 0 ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  if (!pinned_memory().add(pointer, bytes)) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  pinned().take(bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  const auto bytes = pinned_memory().remove(pointer);
  pinned().give(bytes);
  return bytes == 0 ? cudaErrorHostMemoryNotRegistered : cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** of_device, void* pointer,
                                     unsigned) {
  *of_device = pointer;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                     const void* pointer) {
  *attributes = {};
  attributes->device = current_device();
  attributes->type = cudaMemoryTypeUnregistered;
  if (const auto index = device_of(pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = *index;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (pinned_memory().has(pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer =
        const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes,
                       cudaMemcpyKind) {
  if (const auto refused = wait_for_copy(to, from, bytes)) return refused;
  copy_bytes(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                            cudaMemcpyKind, cudaStream_t stream) {
  return enqueue_copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int,
                                std::size_t bytes, cudaStream_t stream) {
  return enqueue_copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int,
                           std::size_t bytes) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width,
                              std::size_t height, cudaMemcpyKind,
                              cudaStream_t stream) {
  tell_of_copy(to, from, width * height, stream);
  capture().enqueue(stream);
  copy_rows(to, to_pitch, from, from_pitch, width, height);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from,
                         std::size_t from_pitch, std::size_t width,
                         std::size_t height, cudaMemcpyKind) {
  if (const auto refused = wait_for_copy(to, from, width * height)) {
    return refused;
  }
  copy_rows(to, to_pitch, from, from_pitch, width, height);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int value, std::size_t bytes) {
  timekeeper().move(nullptr, "memset", static_cast<double>(bytes));
  set_bytes(pointer, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, std::size_t bytes,
                            cudaStream_t stream) {
  timekeeper().move(stream, "memset", static_cast<double>(bytes));
  set_bytes(pointer, value, bytes);
  return capture().enqueue(stream);
}

// Memory of other processes: a handle is the address, which means the same in
// all of them.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  *handle = {};
  std::memcpy(handle, &pointer, sizeof pointer);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle,
                                 unsigned) {
  std::memcpy(pointer, &handle, sizeof *pointer);
  return cudaSuccess;
}

}  // extern "C"
