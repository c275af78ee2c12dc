// CUDA's runtime: which devices there are and what they can do.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "phantom/driver/capture.h"
#include "phantom/driver/device.h"
#include "phantom/driver/listener.h"
#include "phantom/driver/order.h"
#include "phantom/driver/timekeeper.h"

namespace lowtide::dry {
namespace {

bool exists(int index) { return index >= 0 && index < device_count(); }

void describe(cudaDeviceProp& properties, int index) {
  const Gpu& gpu = *settings().gpu;
  const auto of = [&](CUdevice_attribute which) {
    return attribute(gpu, which);
  };
  properties = {};
  gpu.name.copy(properties.name, sizeof properties.name - 1);
  std::memset(properties.uuid.bytes, index + 1, sizeof properties.uuid.bytes);
  properties.totalGlobalMem = settings().memory;
  properties.major = gpu.major;
  properties.minor = gpu.minor;
  properties.multiProcessorCount = gpu.multiprocessors;
  properties.warpSize = 32;
  properties.maxThreadsPerBlock = 1024;
  properties.maxThreadsPerMultiProcessor = gpu.threads;
  properties.maxBlocksPerMultiProcessor = gpu.blocks;
  properties.regsPerBlock = properties.regsPerMultiprocessor =
      of(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
  properties.sharedMemPerBlock =
      of(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  properties.sharedMemPerBlockOptin = gpu.shared_memory_of_block;
  properties.sharedMemPerMultiprocessor = gpu.shared_memory;
  properties.reservedSharedMemPerBlock =
      of(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  properties.totalConstMem = of(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  properties.l2CacheSize = gpu.l2_cache;
  properties.memoryBusWidth = gpu.bus_width;
  properties.pciBusID = index + 1;
  properties.textureAlignment = 512;
  properties.memPitch = 2147483647;
  properties.asyncEngineCount = 3;
  properties.concurrentKernels = properties.unifiedAddressing =
      properties.managedMemory = properties.cooperativeLaunch =
          properties.streamPrioritiesSupported = properties.canMapHostMemory =
              properties.memoryPoolsSupported = 1;
  constexpr int kGrid[] = {2147483647, 65535, 65535};
  std::copy(std::begin(kGrid), std::end(kGrid), properties.maxGridSize);
  constexpr int kBlock[] = {1024, 1024, 64};
  std::copy(std::begin(kBlock), std::end(kBlock), properties.maxThreadsDim);
}

}  // namespace
}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* index) {
  *index = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  return set_current_device(index) ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaInitDevice(int index, unsigned, unsigned) {
  return exists(index) ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
  if (!exists(index)) return cudaErrorInvalidDevice;
  describe(*properties, index);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which,
                                   int index) {
  if (!exists(index)) return cudaErrorInvalidDevice;
  *value = attribute(*settings().gpu, which);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int index) {
  if (!exists(index)) return cudaErrorInvalidDevice;
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0",
                index + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* index, const char* text) {
  unsigned bus = 0;
  if (std::sscanf(text, "%*x:%x", &bus) != 1) return cudaErrorInvalidValue;
  *index = static_cast<int>(bus) - 1;
  return exists(*index) ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int index, int other) {
  if (!exists(index) || !exists(other)) return cudaErrorInvalidDevice;
  *can = index != other && settings().gpu->peers;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetLimit(std::size_t* value, cudaLimit) {
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = kLeastPriority;
  if (greatest) *greatest = kGreatestPriority;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ++host_waits();
  if (const auto refused = capture().host_waits()) return refused;
  wait_for_ever_if(order().is_stuck());
  device(current_device()).completion.wait_for_device();
  timekeeper().synchronize_all();
  listener().hear_waited(current_device());
  return cudaSuccess;
}

}  // extern "C"
