// CUDA C++ on a CPU: kernels and grids of csrc/ops/cuda/*.cuh, included after
// this header, run with a host thread for each of theirs, several groups of
// threads at once.
//
// Only what those kernels use.  Nothing of the compiler or of the hardware is
// seen this way; ThreadSanitizer sees races within a group and between groups
// (`make sanitize SANITIZE=thread`).
#pragma once

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads)

// At the same place in every group, as CUDA's.
#define LOWTIDE_SHARED(type, name, count)                         \
  static const std::size_t name##_begins =                        \
      ::lowtide::ops::on_host::place_shared(sizeof(type[count])); \
  auto* const name = reinterpret_cast<type*>(                     \
      ::lowtide::ops::on_host::group->shared + name##_begins)

namespace lowtide::ops::on_host {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kThreads = 256;  // of every group
inline constexpr std::int64_t kGroupsAtOnce = 3;
inline constexpr std::size_t kSharedBytes = 1024;  // of a group

struct Index {
  unsigned x = 0;
};

// What the threads of a group have in common.
struct Group {
  Group() : all(kThreads), lanes(kThreads) {
    for (unsigned i = 0; i < kThreads; i += kWarp) {
      warps.push_back(std::make_unique<std::barrier<>>(kWarp));
    }
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<double> lanes;
  alignas(16) std::byte shared[kSharedBytes];
};

inline thread_local Group* group = nullptr;

inline std::size_t place_shared(std::size_t bytes) {
  static std::atomic<std::size_t> used{0};
  const auto begins = used.fetch_add((bytes + 15) / 16 * 16);
  if (begins + bytes > kSharedBytes) throw std::length_error("shared memory");
  return begins;
}

struct Launch {
  std::int64_t groups;
  int threads;
  bool operator==(const Launch&) const = default;
};

// What has been launched; a test may empty it.
inline std::vector<Launch> launches;
// Groups that fill the device; a test may change it.
inline std::int64_t resident = 4;
// Whether the device adds four values at once; a test may change it.
inline bool adds_four = true;
// How often it did; a test may set it to 0.
inline std::atomic<std::int64_t> fours_added = 0;

}  // namespace lowtide::ops::on_host

inline thread_local lowtide::ops::on_host::Index threadIdx;
inline thread_local lowtide::ops::on_host::Index blockIdx;
inline thread_local lowtide::ops::on_host::Index gridDim;

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

// Its threads wait for launches, because to start them takes longer than what
// they do.
class Processors {
 public:
  Processors() : groups_(kGroupsAtOnce), start_(kAll + 1), end_(kAll + 1) {
    for (std::int64_t i = 0; i < kAll; ++i) {
      threads_.emplace_back([this, i] { serve(i / kThreads, i % kThreads); });
    }
  }
  ~Processors() {
    kernel_ = nullptr;
    start_.arrive_and_wait();
  }

  // For a kernel without branches around barriers, and that does not throw.
  void run(std::int64_t groups, std::function<void()> kernel) {
    num_groups_ = groups;
    kernel_ = std::move(kernel);
    start_.arrive_and_wait();
    end_.arrive_and_wait();
  }

 private:
  static constexpr std::int64_t kAll = kGroupsAtOnce * kThreads;

  void serve(std::int64_t processor, std::int64_t thread) {
    group = &groups_[static_cast<std::size_t>(processor)];
    threadIdx.x = static_cast<unsigned>(thread);
    for (start_.arrive_and_wait(); kernel_; start_.arrive_and_wait()) {
      gridDim.x = static_cast<unsigned>(num_groups_);
      for (auto i = processor; i < num_groups_; i += kGroupsAtOnce) {
        blockIdx.x = static_cast<unsigned>(i);
        // NaN, whatever the group before has left.
        if (thread == 0) std::memset(group->shared, 0xFF, kSharedBytes);
        __syncthreads();
        kernel_();
        __syncthreads();
      }
      end_.arrive_and_wait();
    }
  }

  std::vector<Group> groups_;
  std::barrier<> start_;
  std::barrier<> end_;
  std::int64_t num_groups_ = 0;
  std::function<void()> kernel_;
  std::vector<std::jthread> threads_;
};

inline Processors& processors() {
  static Processors all;
  return all;
}

}  // namespace lowtide::ops::on_host

// The forms of launch.h; without a name outside, because the library that a
// test links has CUDA's.
namespace lowtide::ops::cuda {
namespace {

struct Stream {};
Stream current_stream() { return {}; }
std::int64_t resident_groups() { return on_host::resident; }

// CUDA's own headers may be there, too, with theirs.
struct alignas(16) float4 {
  float x, y, z, w;
};
float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

bool add_at_once(float4* to, float4 by) {
  if (!on_host::adds_four) return false;
  ++on_host::fours_added;
  // CUDA takes an address that is a multiple of 16 bytes.
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(float4) != 0) {
    throw std::invalid_argument("misaligned address");
  }
  float* const values[] = {&to->x, &to->y, &to->z, &to->w};
  const float addends[] = {by.x, by.y, by.z, by.w};
  for (int k = 0; k < 4; ++k) atomicAdd(values[k], addends[k]);
  return true;
}

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), std::int64_t groups, int threads,
            const Stream& /*stream*/,
            const std::type_identity_t<Parameters>&... arguments) {
  constexpr std::int64_t kMostGroups = 0x7fffffff;
  if (groups < 1 || groups > kMostGroups || threads != on_host::kThreads) {
    throw std::invalid_argument("invalid configuration argument");
  }
  on_host::launches.push_back({groups, threads});
  on_host::processors().run(groups, [&] { kernel(arguments...); });
}

}  // namespace
}  // namespace lowtide::ops::cuda
