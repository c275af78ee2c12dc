#include "phantom/driver/gpus.h"

#include <cuda.h>

#include <algorithm>
#include <iterator>
#include <map>

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
#define LOWTIDE_IS(name) CU_DEVICE_ATTRIBUTE_##name
  static const std::map<int, int Gpu::*> kOfGpus = {
      {LOWTIDE_IS(COMPUTE_CAPABILITY_MAJOR), &Gpu::major},
      {LOWTIDE_IS(COMPUTE_CAPABILITY_MINOR), &Gpu::minor},
      {LOWTIDE_IS(MULTIPROCESSOR_COUNT), &Gpu::multiprocessors},
      {LOWTIDE_IS(MAX_THREADS_PER_MULTIPROCESSOR), &Gpu::threads},
      {LOWTIDE_IS(MAX_BLOCKS_PER_MULTIPROCESSOR), &Gpu::blocks},
      {LOWTIDE_IS(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
       &Gpu::shared_memory_of_block},
      {LOWTIDE_IS(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR), &Gpu::shared_memory},
      {LOWTIDE_IS(L2_CACHE_SIZE), &Gpu::l2_cache},
      {LOWTIDE_IS(CLOCK_RATE), &Gpu::clock},
      {LOWTIDE_IS(MEMORY_CLOCK_RATE), &Gpu::memory_clock},
      {LOWTIDE_IS(GLOBAL_MEMORY_BUS_WIDTH), &Gpu::bus_width},
  };
  static const std::map<int, int> kOfAll = {
      {LOWTIDE_IS(WARP_SIZE), 32},
      {LOWTIDE_IS(MAX_THREADS_PER_BLOCK), 1024},
      {LOWTIDE_IS(MAX_BLOCK_DIM_X), 1024},
      {LOWTIDE_IS(MAX_BLOCK_DIM_Y), 1024},
      {LOWTIDE_IS(MAX_BLOCK_DIM_Z), 64},
      {LOWTIDE_IS(MAX_GRID_DIM_X), 2147483647},
      {LOWTIDE_IS(MAX_GRID_DIM_Y), 65535},
      {LOWTIDE_IS(MAX_GRID_DIM_Z), 65535},
      {LOWTIDE_IS(MAX_REGISTERS_PER_BLOCK), 64 * kKiB},
      {LOWTIDE_IS(MAX_REGISTERS_PER_MULTIPROCESSOR), 64 * kKiB},
      {LOWTIDE_IS(MAX_SHARED_MEMORY_PER_BLOCK), 48 * kKiB},
      {LOWTIDE_IS(RESERVED_SHARED_MEMORY_PER_BLOCK), kKiB},
      {LOWTIDE_IS(TOTAL_CONSTANT_MEMORY), 64 * kKiB},
      {LOWTIDE_IS(COOPERATIVE_LAUNCH), 1},
      {LOWTIDE_IS(STREAM_PRIORITIES_SUPPORTED), 1},
      {LOWTIDE_IS(UNIFIED_ADDRESSING), 1},
      {LOWTIDE_IS(MANAGED_MEMORY), 1},
      {LOWTIDE_IS(CONCURRENT_KERNELS), 1},
      {LOWTIDE_IS(ASYNC_ENGINE_COUNT), 1},
      {LOWTIDE_IS(CAN_MAP_HOST_MEMORY), 1},
      {LOWTIDE_IS(MEMORY_POOLS_SUPPORTED), 1},
      {LOWTIDE_IS(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1},
      {LOWTIDE_IS(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED), 1},
  };
  // NVLink's switch.
  if (which == LOWTIDE_IS(MULTICAST_SUPPORTED)) return gpu.major >= 9;
#undef LOWTIDE_IS
  const auto own = kOfGpus.find(which);
  if (own != kOfGpus.end()) return gpu.*own->second;
  const auto of_all = kOfAll.find(which);
  return of_all == kOfAll.end() ? 0 : of_all->second;
}

}  // namespace lowtide::dry
