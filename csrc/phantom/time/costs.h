// How long a kernel and a collective take: a roofline and NCCL's ring formula.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "phantom/time/machine.h"

namespace lowtide::phantom {

// What one kernel does.
struct Work {
  double flops = 0;  // a multiplication and an addition are two
  double bytes = 0;  // read and written, once each
  Rate rate = Rate::fp32;
  bool is_attention = false;
};

// The longer of computing and of moving its bytes, at least the floor.
double kernel_seconds(const Work& work, const Accelerator& accelerator);

enum class CollectiveKind : std::uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
  send,
};
std::string_view name_of(CollectiveKind kind);  // "all-gather", ...

// The ranks of a group, as its collectives see them.
struct Placement {
  std::int64_t num_ranks = 1;
  std::int64_t num_nodes = 1;
};
// `ranks`: global ones, `ranks_per_node` consecutive ones share a node.
Placement place(const std::vector<std::int64_t>& ranks,
                std::int64_t ranks_per_node);

// `bytes`: of the full buffer on one rank (all-gather: the output; otherwise
// the input), all tensors of a coalesced call together, which pays its latency
// once.  No time for one rank.
double collective_seconds(CollectiveKind kind, double bytes,
                          const Placement& placement, const Network& network);

}  // namespace lowtide::phantom
