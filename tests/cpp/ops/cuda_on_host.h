// CUDA C++ on a CPU: kernels of csrc/ops/cuda/*.cuh, included after this
// header, run with a host thread for each of theirs, one group of threads at a
// time.
//
// Only what those kernels use.  Nothing of the compiler or of the hardware is
// seen this way.
#pragma once

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)

namespace lowtide::ops::on_host {

inline constexpr unsigned kWarp = 32;

struct Index {
  unsigned x = 0;
};

// Of the group that runs.
struct Group {
  explicit Group(unsigned threads) : all(threads), lanes(threads) {
    for (unsigned i = 0; i < threads; i += kWarp) {
      warps.push_back(std::make_unique<std::barrier<>>(kWarp));
    }
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<double> lanes;
};

inline Group* group = nullptr;

}  // namespace lowtide::ops::on_host

inline thread_local lowtide::ops::on_host::Index threadIdx;
inline lowtide::ops::on_host::Index blockIdx;
inline lowtide::ops::on_host::Index gridDim;

inline void __syncthreads() {
  lowtide::ops::on_host::group->all.arrive_and_wait();
}

inline double __shfl_down_sync(unsigned /*mask*/, double value, int by) {
  using namespace lowtide::ops::on_host;
  auto& warp = *group->warps[threadIdx.x / kWarp];
  const unsigned from = threadIdx.x + static_cast<unsigned>(by);
  group->lanes[threadIdx.x] = value;
  warp.arrive_and_wait();
  const bool inside = from / kWarp == threadIdx.x / kWarp;
  const double taken = inside ? group->lanes[from] : value;
  warp.arrive_and_wait();
  return taken;
}

inline void atomicAdd(float* to, float by) { std::atomic_ref(*to) += by; }

namespace lowtide::ops::on_host {

// kernel<<<groups, threads>>>(), for a kernel without branches around barriers.
template <typename Kernel>
void launch(unsigned groups, unsigned threads, const Kernel& kernel) {
  Group running(threads);
  group = &running;
  gridDim.x = groups;
  blockIdx.x = 0;
  std::barrier next(threads, []() noexcept { ++blockIdx.x; });
  {
    std::vector<std::jthread> all;
    for (unsigned thread = 0; thread < threads; ++thread) {
      all.emplace_back([&, thread] {
        threadIdx.x = thread;
        while (blockIdx.x < gridDim.x) {
          kernel();
          next.arrive_and_wait();
        }
      });
    }
  }
  group = nullptr;
}

}  // namespace lowtide::ops::on_host
