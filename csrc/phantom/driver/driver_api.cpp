// CUDA's driver: devices, contexts, modules and kernels, as Triton and NVRTC's
// callers use them.  A context is the number of its device, plus one.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "base/dynamic_loader.h"
#include "phantom/driver/device.h"
#include "phantom/driver/kernels.h"
#include "phantom/driver/missing.h"

namespace lowtide::dry {
namespace {

CUcontext context_of(int index) {
  return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(index) + 1);
}

CUresult as_driver(cudaError_t error) { return static_cast<CUresult>(error); }

bool exists(CUdevice index) { return index >= 0 && index < device_count(); }

const char* text_of(CUresult error) {
  switch (error) {
    case CUDA_SUCCESS:
      return "no error";
    case CUDA_ERROR_OUT_OF_MEMORY:
      return "out of memory";
    case CUDA_ERROR_INVALID_DEVICE:
      return "invalid device ordinal";
    case CUDA_ERROR_NOT_SUPPORTED:
      return "operation not supported";
    default:
      return "invalid argument";
  }
}

template <typename Handle>
CUresult create(Handle* handle) {
  make_handle(handle);
  return CUDA_SUCCESS;
}

// Names of the kernels of modules that were loaded.
struct ModuleKernels {
  std::mutex mutex;
  std::map<CUfunction, std::string> names;

  static ModuleKernels& instance() {
    static ModuleKernels kernels;
    return kernels;
  }
  CUresult make(CUfunction* function, const char* name) {
    create(function);
    const std::lock_guard lock(mutex);
    names[*function] = name;
    return CUDA_SUCCESS;
  }
  // Valid for ever: names are never taken out.
  const char* of(CUfunction function) {
    const std::lock_guard lock(mutex);
    const auto found = names.find(function);
    return found == names.end() ? "" : found->second.c_str();
  }
};

CUresult launch_function(CUfunction function, dim3 grid, CUstream stream) {
  const Launch launched{ModuleKernels::instance().of(function),
                        blocks_of(grid)};
  return as_driver(launch(stream, launched));
}

// The newest of a function's versions, which its header calls by the name
// without one.
void* function_named(const char* name) {
  static void* const self = [] {
    Dl_info info = {};
    dladdr(reinterpret_cast<void*>(&lowtide_dry_missing), &info);
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  for (const char* version : {"_v4", "_v3", "_v2", ""}) {
    if (void* found = dlsym(self, (std::string(name) + version).c_str())) {
      return found;
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = text_of(error);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = text_of(error);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = device_count();
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return exists(index) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice index) {
  if (!exists(index)) return CUDA_ERROR_INVALID_DEVICE;
  const auto text = std::string(settings().gpu->name);
  std::strncpy(name, text.c_str(), static_cast<std::size_t>(length));
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice index) {
  if (!exists(index)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = settings().memory;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which,
                              CUdevice index) {
  if (!exists(index)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute(*settings().gpu, which);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice index) {
  std::memset(uuid->bytes, index + 1, sizeof uuid->bytes);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice index) {
  return as_driver(cudaDeviceGetPCIBusId(text, length, index));
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice index, CUdevice other) {
  return as_driver(cudaDeviceCanAccessPeer(can, index, other));
}

// torch asks before it makes a thread's streams current.
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice index) {
  *context = context_of(index);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  const auto number = reinterpret_cast<std::uintptr_t>(context);
  if (number != 0) set_current_device(static_cast<int>(number) - 1);
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
  return cuCtxSetCurrent(context);
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  return context != nullptr ? cuCtxGetCurrent(context) : CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* index) {
  *index = current_device();
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() { return as_driver(cudaDeviceSynchronize()); }
CUresult cuCtxGetLimit(std::size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule* module, const char*) { return create(module); }
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  return create(module);
}
CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned,
                            CUjit_option*, void**) {
  return create(module);
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  return ModuleKernels::instance().make(function, name);
}
CUresult cuLibraryLoadData(CUlibrary* library, const void*, CUjit_option*,
                           void**, unsigned, CUlibraryOption*, void**,
                           unsigned) {
  return create(library);
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) {
  return ModuleKernels::instance().make(reinterpret_cast<CUfunction*>(kernel),
                                        name);
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
// NVRTC's callers join code and load what comes out, which is not looked into.
CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* state) {
  return create(state);
}
CUresult cuLinkComplete(CUlinkState, void** code, std::size_t* bytes) {
  static char nothing = 0;
  *code = &nothing;
  *bytes = sizeof nothing;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which,
                            CUfunction) {
  const bool is_code = which == CU_FUNC_ATTRIBUTE_PTX_VERSION ||
                       which == CU_FUNC_ATTRIBUTE_BINARY_VERSION;
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : which == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
           : is_code                                        ? code_version()
                                                            : 0;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction,
                                                     int, std::size_t) {
  *blocks = kBlocksOfMultiprocessor;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction,
                                      const CUlaunchConfig*) {
  *clusters = settings().gpu->multiprocessors;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z,
                        unsigned, unsigned, unsigned, unsigned, CUstream stream,
                        void**, void**) {
  return launch_function(function, {x, y, z}, stream);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* configuration,
                          CUfunction function, void**, void**) {
  return launch_function(function,
                         {configuration->gridDimX, configuration->gridDimY,
                          configuration->gridDimZ},
                         configuration->hStream);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned x, unsigned y,
                                   unsigned z, unsigned, unsigned, unsigned,
                                   unsigned, CUstream stream, void**) {
  return launch_function(function, {x, y, z}, stream);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType,
                                cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*,
                                const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  *map = {};
  return CUDA_SUCCESS;
}

// Tables that NVIDIA's libraries have in common: NVRTC does without.
CUresult cuGetExportTable(const void**, const CUuuid*) {
  return CUDA_ERROR_NOT_FOUND;
}
// Nothing is logged.
CUresult cuLogsRegisterCallback(CUlogsCallback, void*,
                                CUlogsCallbackHandle* handle) {
  return handle ? create(handle) : CUDA_SUCCESS;
}
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }

// How libraries find the driver's functions.
CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t,
                          CUdriverProcAddressQueryResult* result) {
  *function = function_named(name);
  if (result) {
    *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS
                        : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  *function = function_named(name);
  if (result) {
    *result = *function ? cudaDriverEntryPointSuccess
                        : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

}  // extern "C"
