#include "phantom/driver/collective_time.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "phantom/driver/timekeeper.h"

namespace lowtide::dry {
namespace {

using phantom::CollectiveCall;
using phantom::CollectiveKind;

struct Limits {
  std::mutex mutex;
  std::map<std::int64_t, int> most;  // by the number of the communicator

  static Limits& instance() {
    static Limits limits;
    return limits;
  }
  int of(const Communicator& communicator) {
    const std::lock_guard lock(mutex);
    const auto found = most.find(communicator.number);
    return found == most.end() ? 0 : found->second;
  }
};

struct Kernel {
  Communicator communicator;
  cudaStream_t stream = nullptr;
  std::vector<CollectiveCall> calls;
};

// The calling thread's group; calls outside of one are a group each.
struct Pending {
  int depth = 0;
  std::vector<Kernel> kernels;
};
thread_local Pending pending;

std::int64_t node_of(const Communicator& communicator, int rank) {
  const auto place = static_cast<std::size_t>(rank);
  const auto& ranks = communicator.group.ranks;
  const auto of_world = place < ranks.size() ? ranks[place] : rank;
  return of_world / timekeeper().network().ranks_per_node;
}

void launch(const Kernel& kernel) {
  const auto& network = timekeeper().network();
  const auto placement =
      phantom::place(kernel.communicator.group.ranks, network.ranks_per_node);
  const auto cost =
      phantom::group_cost(kernel.calls, placement, network,
                          Limits::instance().of(kernel.communicator));
  timekeeper().collective(kernel.stream, kernel.communicator.number,
                          phantom::name_of(kernel.calls.front().kind), cost);
}

}  // namespace

void limit_channels(const Communicator& communicator, int most) {
  auto& limits = Limits::instance();
  const std::lock_guard lock(limits.mutex);
  limits.most[communicator.number] = most;
}

void time_collective(const Communicator& communicator, CollectiveKind kind,
                     std::size_t bytes, int peer, cudaStream_t stream) {
  if (!timekeeper().runs()) return;
  CollectiveCall call{kind, static_cast<double>(bytes)};
  call.leaves_node = peer >= 0 && node_of(communicator, peer) !=
                                      node_of(communicator, communicator.rank);
  auto& kernels = pending.kernels;
  const auto same = [&](const Kernel& kernel) {
    return kernel.communicator.number == communicator.number;
  };
  auto found = std::find_if(kernels.begin(), kernels.end(), same);
  if (found == kernels.end()) {
    found = kernels.insert(kernels.end(), {communicator, stream, {}});
  }
  found->calls.push_back(call);
  if (pending.depth == 0) {
    time_group_begins();
    time_group_ends();
  }
}

void time_group_begins() { ++pending.depth; }

void time_group_ends() {
  if (--pending.depth > 0) return;
  pending.depth = 0;
  const auto kernels = std::exchange(pending.kernels, {});
  if (!timekeeper().runs()) return;
  for (const auto& kernel : kernels) launch(kernel);
}

}  // namespace lowtide::dry
