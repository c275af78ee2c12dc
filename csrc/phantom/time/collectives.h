// How long collectives take, by NCCL's tuning model, and what they take of the
// device meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "phantom/time/machine.h"

namespace lowtide::phantom {

enum class CollectiveKind : std::uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
  send,
  receive,
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

// What the slowest part of a collective's way is.
enum class Link : std::uint8_t { none, in_node, between_nodes };
inline constexpr std::size_t kNumLinks = 3;

// What a collective takes of the device, alone on its links.
struct CollectiveCost {
  double seconds = 0;         // once it runs
  std::int64_t channels = 0;  // multiprocessors that it holds meanwhile
  double bytes = 0;           // as of collective_seconds
  double traffic = 0;         // bytes that it reads and writes in memory
  Link link = Link::none;
  double link_seconds = 0;  // of `seconds`, for which it would fill the link
};

// One operation between ncclGroupStart and ncclGroupEnd.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::all_gather;
  double bytes = 0;          // as of collective_seconds
  bool leaves_node = false;  // send, receive: to or from another node
};

// [Note: What a group costs]
// NCCL runs the operations of one group on one communicator in one kernel, a
// block for each channel.
//
// Protocol.  Operations of one kind share one, which NCCL chooses by their
// bytes together (ncclPrepareTasks in src/enqueue.cc; there only those that are
// less than four times as large as the smallest).
//
// Channels.  An operation alone gets as many as its bytes fill, a threshold
// each that depends on the protocol (topoGetAlgoInfo in src/enqueue.cc), up to
// those of the communicator, which its maxCTAs limits (ncclTopoPostset in
// src/graph/connect.cc).  A group has the sum of its operations' channels, up
// to the same limit (scheduleCollTasksToPlan in src/enqueue.cc).  Between two
// ranks it is parts of 64 KiB and more (addP2pToPlan, and
// ncclTopoComputeP2pChannels in src/graph/paths.cc).
//
// Latency.  scheduleCollTasksToPlan deals the group's bytes to its n channels
// one operation after another, so that K operations lie on K + n - 1 places and
// a channel works on 1 + (K - 1) / n of them on average, one after another;
// each passes around the ring.  The kernel's own latency is paid once.
// ncclTopoGetAlgoTime (src/graph/tuning.cc) multiplies both by ceil(K / n) when
// it chooses the algorithm.
//
// Bytes.  All operations of the group share the links; one channel carries no
// more than `channel_bandwidth`.
//
// Memory.  An operation reads what it sends and writes what it receives once.
// NCCL's own buffers, 4 MiB a channel (src/init.cc), are not counted: what is
// in flight fits the L2 (assumption).

// The operations of a group on a communicator.  `most_channels`: its maxCTAs; 0
// and less: no limit.  No cost for one rank.
CollectiveCost group_cost(const std::vector<CollectiveCall>& calls,
                          const Placement& placement, const Network& network,
                          std::int64_t most_channels = 0);

}  // namespace lowtide::phantom
