#include "phantom/driver/gpus.h"

#include <cuda.h>

#include <algorithm>
#include <iterator>

namespace lowtide::dry {
namespace {

constexpr int kKiB = 1 << 10;
constexpr int kMiB = 1 << 20;

// Capabilities, multiprocessors, shared memory and threads: the tables of
// compute capabilities in the CUDA programming guide.  Memory: what torch's
// messages ("total capacity of 79.11 GiB") and properties report on them.
constexpr Gpu kGpus[] = {
    {"a100-40", "NVIDIA A100-SXM4-40GB", 8, 0, 39.39, 108, 2048, 32, 164 * kKiB,
     163 * kKiB, 40 * kMiB, 1410000, 1215000, 5120, true},
    {"a100-80", "NVIDIA A100-SXM4-80GB", 8, 0, 79.15, 108, 2048, 32, 164 * kKiB,
     163 * kKiB, 40 * kMiB, 1410000, 1593000, 5120, true},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 79.11, 132, 2048, 32, 228 * kKiB,
     227 * kKiB, 50 * kMiB, 1980000, 2619000, 5120, true},
    {"h200", "NVIDIA H200", 9, 0, 139.81, 132, 2048, 32, 228 * kKiB, 227 * kKiB,
     60 * kMiB, 1980000, 3201000, 6144, true},
    {"b200", "NVIDIA B200", 10, 0, 178.35, 148, 2048, 32, 228 * kKiB,
     227 * kKiB, 126 * kMiB, 1965000, 3996000, 8192, true},
    {"l40s", "NVIDIA L40S", 8, 9, 44.39, 142, 1536, 24, 100 * kKiB, 99 * kKiB,
     96 * kMiB, 2520000, 9001000, 384, true},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 8, 9, 23.64, 128, 1536, 24,
     100 * kKiB, 99 * kKiB, 72 * kMiB, 2520000, 10501000, 384, false},
};

}  // namespace

std::size_t Gpu::memory() const {
  constexpr double kStepsOfGibibyte = 512;
  constexpr auto kStep = std::size_t{2} << 20;
  return static_cast<std::size_t>(gibibytes * kStepsOfGibibyte) * kStep;
}

const Gpu* gpu_named(std::string_view key) {
  const auto* found = std::ranges::find(kGpus, key, &Gpu::key);
  return found == std::end(kGpus) ? nullptr : found;
}

std::string_view gpu_names() {
  return "a100-40, a100-80, h100, h200, b200, l40s, rtx4090";
}

int attribute(const Gpu& gpu, int which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return gpu.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return gpu.minor;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return gpu.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return gpu.threads;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      return gpu.blocks;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      return 64 * kKiB;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return 48 * kKiB;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return gpu.shared_memory_of_block;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return gpu.shared_memory;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      return kKiB;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
      return 64 * kKiB;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return gpu.l2_cache;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return gpu.clock;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return gpu.memory_clock;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return gpu.bus_width;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:  // NVLink's switch
      return gpu.major >= 9;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return 1;
    default:
      return 0;
  }
}

}  // namespace lowtide::dry
