// NVML: the GPUs as their management library shows them.  No header of it comes
// with torch; the few functions that torch and pynvml's callers use are
// declared here as NVIDIA documents them.
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "phantom/driver/device.h"

#define LOWTIDE_NVML extern "C" __attribute__((visibility("default")))

namespace {

using namespace lowtide::dry;

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;

struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

struct MemoryOfVersion2 {
  unsigned version;
  unsigned long long total;
  unsigned long long reserved;
  unsigned long long free;
  unsigned long long used;
};

struct Utilization {
  unsigned gpu;
  unsigned memory;
};

// A device's handle is its number plus one.
using Handle = struct Nvml*;

int index_of(Handle handle) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(handle)) - 1;
}

int write(char* to, unsigned length, const std::string& text) {
  std::snprintf(to, length, "%s", text.c_str());
  return kSuccess;
}

}  // namespace

LOWTIDE_NVML int nvmlInit_v2() { return kSuccess; }
LOWTIDE_NVML int nvmlInit() { return kSuccess; }
LOWTIDE_NVML int nvmlInitWithFlags(unsigned) { return kSuccess; }
LOWTIDE_NVML int nvmlShutdown() { return kSuccess; }
LOWTIDE_NVML const char* nvmlErrorString(int) { return "dry"; }
LOWTIDE_NVML int nvmlSystemGetDriverVersion(char* text, unsigned length) {
  return write(text, length, "580.0 (dry)");
}
LOWTIDE_NVML int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDA_VERSION;
  return kSuccess;
}
LOWTIDE_NVML int nvmlSystemGetCudaDriverVersion(int* version) {
  return nvmlSystemGetCudaDriverVersion_v2(version);
}
LOWTIDE_NVML int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(device_count());
  return kSuccess;
}
LOWTIDE_NVML int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* handle) {
  if (index >= static_cast<unsigned>(device_count())) return kInvalidArgument;
  *handle = reinterpret_cast<Handle>(static_cast<std::uintptr_t>(index) + 1);
  return kSuccess;
}
LOWTIDE_NVML int nvmlDeviceGetHandleByPciBusId_v2(const char* text,
                                                  Handle* handle) {
  unsigned bus = 0;
  if (std::sscanf(text, "%*x:%x", &bus) != 1 || bus == 0) {
    return kInvalidArgument;
  }
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle);
}
LOWTIDE_NVML int nvmlDeviceGetName(Handle, char* text, unsigned length) {
  return write(text, length, std::string(settings().gpu->name));
}
// As CUDA's runtime has it: each byte is the device's number plus one.
LOWTIDE_NVML int nvmlDeviceGetUUID(Handle handle, char* text, unsigned length) {
  char byte[3];
  std::snprintf(byte, sizeof byte, "%02x",
                static_cast<unsigned char>(index_of(handle) + 1));
  std::string uuid = "GPU";
  for (const int bytes : {4, 2, 2, 2, 6}) {
    uuid += '-';
    for (int i = 0; i < bytes; ++i) uuid += byte;
  }
  return write(text, length, uuid);
}
LOWTIDE_NVML int nvmlDeviceGetMemoryInfo(Handle handle, Memory* memory) {
  const auto& gauge = device(index_of(handle)).memory;
  *memory = {gauge.most(), gauge.most() - gauge.now(), gauge.now()};
  return kSuccess;
}
LOWTIDE_NVML int nvmlDeviceGetMemoryInfo_v2(Handle handle,
                                            MemoryOfVersion2* memory) {
  Memory found = {};
  nvmlDeviceGetMemoryInfo(handle, &found);
  *memory = {memory->version, found.total, 0, found.free, found.used};
  return kSuccess;
}
// A GPU that does nothing, and is cold.
LOWTIDE_NVML int nvmlDeviceGetUtilizationRates(Handle, Utilization* percent) {
  *percent = {};
  return kSuccess;
}
LOWTIDE_NVML int nvmlDeviceGetTemperature(Handle, int, unsigned* degrees) {
  *degrees = 0;
  return kSuccess;
}
LOWTIDE_NVML int nvmlDeviceGetPowerUsage(Handle, unsigned* milliwatts) {
  *milliwatts = 0;
  return kSuccess;
}
LOWTIDE_NVML int nvmlDeviceGetClockInfo(Handle, int which, unsigned* mhz) {
  constexpr int kMemory = 2;
  const Gpu& gpu = *settings().gpu;
  *mhz =
      static_cast<unsigned>(which == kMemory ? gpu.memory_clock : gpu.clock) /
      1000;
  return kSuccess;
}
LOWTIDE_NVML int nvmlDeviceGetCudaComputeCapability(Handle, int* major,
                                                    int* minor) {
  *major = settings().gpu->major;
  *minor = settings().gpu->minor;
  return kSuccess;
}
// What other processes do is nobody's.
LOWTIDE_NVML int nvmlDeviceGetComputeRunningProcesses_v3(Handle,
                                                         unsigned* count,
                                                         void*) {
  *count = 0;
  return kSuccess;
}
LOWTIDE_NVML int nvmlDeviceGetComputeRunningProcesses(Handle, unsigned* count,
                                                      void*) {
  *count = 0;
  return kSuccess;
}
// NVLink's fabric and its links: asked by torch's symmetric memory, which then
// hands memory over by its store and not by the files of processes that are not
// there.
struct FabricInfo {  // nvmlGpuFabricInfo_v2_t
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};
LOWTIDE_NVML int nvmlDeviceGetGpuFabricInfoV(Handle, FabricInfo* info) {
  constexpr unsigned char kNone = 0;
  constexpr unsigned char kCompleted = 3;
  const auto version = info->version;
  *info = {};
  info->version = version;
  info->state = settings().gpu->peers ? kCompleted : kNone;
  return kSuccess;
}
LOWTIDE_NVML int nvmlDeviceGetNvLinkRemoteDeviceType(Handle, unsigned, void*) {
  return kNotSupported;
}
LOWTIDE_NVML int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle, unsigned, void*) {
  return kNotSupported;
}
