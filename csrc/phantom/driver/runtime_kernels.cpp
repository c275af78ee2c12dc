// CUDA's runtime: kernels, the variables they use, and how they are launched.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "phantom/driver/capture.h"
#include "phantom/driver/device.h"
#include "phantom/driver/kernels.h"
#include "phantom/driver/timekeeper.h"

namespace lowtide::dry {
namespace {

// Variables of kernels, each with an address of its own.
struct Symbols {
  struct Symbol {
    Address address;
    std::size_t bytes;
  };
  std::mutex mutex;
  Address next = kFirstSymbol;
  std::unordered_map<const void*, Symbol> all;

  static Symbols& instance() {
    static Symbols symbols;
    return symbols;
  }
  Symbol of(const void* variable, std::size_t bytes = 0) {
    const std::lock_guard lock(mutex);
    constexpr std::size_t kAlignment = 256;
    const auto [found, added] = all.try_emplace(variable, Symbol{next, bytes});
    if (added) next += (bytes / kAlignment + 1) * kAlignment;
    return found->second;
  }
};

// Names of kernels by their functions on the host: tens of thousands, looked up
// only when time is kept.
struct KernelNames {
  std::mutex mutex;
  std::vector<std::pair<const void*, const char*>> all;
  bool sorted = true;

  static KernelNames& instance() {
    static KernelNames names;
    return names;
  }
  void add(const void* function, const char* name) {
    const std::lock_guard lock(mutex);
    all.emplace_back(function, name);
    sorted = false;
  }
  const char* of(const void* function) {
    const std::lock_guard lock(mutex);
    if (!sorted) std::sort(all.begin(), all.end());
    sorted = true;
    const auto found = std::lower_bound(
        all.begin(), all.end(),
        std::pair<const void*, const char*>(function, nullptr));
    return found != all.end() && found->first == function ? found->second : "";
  }
};

cudaError_t launch_function(const void* function, dim3 grid,
                            cudaStream_t stream) {
  Launch launched{.blocks = blocks_of(grid)};
  if (timekeeper().runs()) launched.name = KernelNames::instance().of(function);
  return launch(stream, launched);
}

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared_memory;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

void* at(const void* symbol, std::size_t offset) {
  return reinterpret_cast<void*>(Symbols::instance().of(symbol).address +
                                 offset);
}

}  // namespace

std::atomic<std::int64_t>& launches() {
  static std::atomic<std::int64_t> launches = 0;
  return launches;
}

cudaError_t launch(cudaStream_t stream, const Launch& launched) {
  ++launches();
  timekeeper().kernel(stream, launched.name, launched.blocks);
  return capture().enqueue(stream);
}

int code_version() {
  const int version = settings().gpu->major * 10 + settings().gpu->minor;
  return version == 89 ? 86 : version;  // wheels bring none for Ada
}

}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

// What a library's code registers when it is loaded.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*,
                            const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  KernelNames::instance().add(function, name);
}
void __cudaRegisterVar(void**, char* variable, char*, const char*, int,
                       std::size_t bytes, int, int) {
  Symbols::instance().of(variable, bytes);
}
char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block,
                                     std::size_t shared_memory,
                                     CUstream_st* stream) {
  configurations.push_back({grid, block, shared_memory, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block,
                                       std::size_t* shared_memory,
                                       void* stream) {
  if (configurations.empty()) return cudaErrorMissingConfiguration;
  const auto& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared_memory = last.shared_memory;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}
// A kernel's handle is the address of its host function.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3, void**,
                               std::size_t, cudaStream_t stream) {
  return launch_function(kernel, grid, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3, void**,
                             std::size_t, cudaStream_t stream) {
  return launch_function(function, grid, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3,
                                        void**, std::size_t,
                                        cudaStream_t stream) {
  return launch_function(function, grid, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                const void* function, void**) {
  return launch_function(function, configuration->gridDim,
                         configuration->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = code_version();
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, std::size_t, unsigned) {
  *blocks = kBlocksOfMultiprocessor;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                          const void*, int,
                                                          std::size_t) {
  *blocks = kBlocksOfMultiprocessor;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t*) {
  *clusters = settings().gpu->multiprocessors;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = at(symbol, 0);
  return cudaSuccess;
}
cudaError_t cudaGetSymbolSize(std::size_t* bytes, const void* symbol) {
  *bytes = Symbols::instance().of(symbol).bytes;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from,
                               std::size_t bytes, std::size_t offset,
                               cudaMemcpyKind kind) {
  return cudaMemcpy(at(symbol, offset), from, bytes, kind);
}
cudaError_t cudaMemcpyToSymbolAsync(const void* symbol, const void* from,
                                    std::size_t bytes, std::size_t offset,
                                    cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpyAsync(at(symbol, offset), from, bytes, kind, stream);
}
cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol,
                                 std::size_t bytes, std::size_t offset,
                                 cudaMemcpyKind kind) {
  return cudaMemcpy(to, at(symbol, offset), bytes, kind);
}

}  // extern "C"
