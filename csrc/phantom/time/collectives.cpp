#include "phantom/time/collectives.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "phantom/time/ways.h"

namespace lowtide::phantom {
namespace {

// NCCL cuts what passes between two ranks into parts: of chunks of 512 KiB in a
// node and of 128 KiB between nodes (computeBuffSizes in src/init.cc) at least
// an eighth and a half, at most 32 and one (addP2pToPlan in src/enqueue.cc).
constexpr double kLeastPart = 64 << 10;
constexpr double kMostPartInNode = 16 << 20;
constexpr double kMostPartBetweenNodes = 128 << 10;
// A channel works on so many of them at once: NCCL_MAX_DEV_WORK_P2P_PER_BATCH
// in src/include/device.h.
constexpr double kPairsAtOnce = 8;

struct Communicator {
  const Placement& placement;
  const Network& network;
  std::int64_t most_channels;

  bool leaves_node() const { return placement.num_nodes > 1; }
  Link link() const {
    return leaves_node() ? Link::between_nodes : Link::in_node;
  }
};

// Those of one kind, as one.
struct Operations {
  std::int64_t number = 0;
  double bytes = 0;
};

std::int64_t most_of(const Placement& placement, const Network& network,
                     std::int64_t limit) {
  const auto most = placement.num_nodes > 1 ? network.channels_between_nodes
                                            : network.channels_in_node;
  return limit > 0 ? std::min(most, limit) : most;
}

bool is_of_pair(CollectiveKind kind) {
  return kind == CollectiveKind::send || kind == CollectiveKind::receive;
}

// What an average rank reads and writes.
double traffic_of(const CollectiveCall& call, const Placement& placement) {
  const auto ranks = static_cast<double>(placement.num_ranks);
  switch (call.kind) {
    case CollectiveKind::all_gather:
    case CollectiveKind::reduce_scatter:
      return call.bytes * (1 + 1 / ranks);
    case CollectiveKind::all_reduce:
    case CollectiveKind::all_to_all:
      return call.bytes * 2;
    case CollectiveKind::broadcast:
    case CollectiveKind::send:
    case CollectiveKind::receive:
      return call.bytes;
  }
  return 0;
}

// A send to and a receive from every other rank.
void add_pairs_of(const CollectiveCall& all_to_all, const Placement& placement,
                  std::vector<CollectiveCall>& pairs) {
  const std::int64_t here = placement.num_ranks / placement.num_nodes;
  const double bytes =
      all_to_all.bytes / static_cast<double>(placement.num_ranks);
  for (std::int64_t peer = 1; peer < placement.num_ranks; ++peer) {
    const bool leaves_node = peer >= here;
    pairs.push_back({CollectiveKind::send, bytes, leaves_node});
    pairs.push_back({CollectiveKind::receive, bytes, leaves_node});
  }
}

std::int64_t channels_of(const Operations& operations, const Protocol& protocol,
                         const Communicator& communicator) {
  const double threshold =
      protocol.channel_bytes +
      protocol.channel_bytes_by_ranks *
          static_cast<double>(communicator.placement.num_ranks);
  const std::int64_t most = communicator.most_channels;
  if (threshold * static_cast<double>(most) <= operations.bytes) return most;
  return std::max(std::int64_t{1},
                  static_cast<std::int64_t>(operations.bytes / threshold));
}

// The one that NCCL would choose, which counts its latency once for every
// operation that the fullest channel works on.
Way chosen_way(CollectiveKind kind, const Operations& operations,
               const Communicator& communicator) {
  const double repeated =
      std::ceil(static_cast<double>(operations.number) /
                static_cast<double>(communicator.most_channels));
  const auto ways = ways_of(kind, operations.bytes, communicator.placement,
                            communicator.network);
  return *std::ranges::min_element(ways, {}, [&](const Way& way) {
    return (way.base + way.hops) * repeated + way.sending;
  });
}

CollectiveCost collectives_cost(
    const std::map<CollectiveKind, Operations>& kinds,
    const Communicator& communicator) {
  CollectiveCost cost;
  double number = 0, base = 0, hops = 0, sending = 0, carried = 0;
  cost.link = communicator.link();
  for (const auto& [kind, operations] : kinds) {
    const Way way = chosen_way(kind, operations, communicator);
    const auto count = static_cast<double>(operations.number);
    number += count;
    base = std::max(base, way.base);
    hops += count * way.hops;
    sending += way.sending;
    carried += way.carried;
    cost.link_seconds += way.link_seconds;
    cost.channels += operations.number *
                     channels_of(operations, *way.protocol, communicator);
  }
  cost.channels = std::min(cost.channels, communicator.most_channels);
  const auto channels = static_cast<double>(cost.channels);
  const double on_a_channel = 1 + (number - 1) / channels;
  cost.seconds =
      base + hops / number * on_a_channel +
      std::max(sending,
               carried / (channels * communicator.network.channel_bandwidth));
  return cost;
}

// One operation between two ranks, by addP2pToPlan.
std::int64_t channels_of_pair(double bytes, std::int64_t all,
                              const Communicator& communicator) {
  const Network& network = communicator.network;
  const std::int64_t most = std::min(
      all, communicator.leaves_node() ? network.channels_of_pair_between_nodes
                                      : network.channels_of_pair_in_node);
  std::int64_t least = most;
  while (least * communicator.placement.num_ranks > all && least > 1)
    least /= 2;
  const double most_part =
      communicator.leaves_node() ? kMostPartBetweenNodes : kMostPartInNode;
  std::int64_t channels =
      std::clamp(static_cast<std::int64_t>(std::ceil(bytes / kLeastPart)),
                 std::int64_t{1}, least);
  while (bytes / static_cast<double>(channels) > most_part &&
         channels <= most / 2) {
    channels *= 2;
  }
  return channels;
}

CollectiveCost pairs_cost(const std::vector<CollectiveCall>& pairs,
                          const Communicator& communicator) {
  const Network& network = communicator.network;
  const auto all = static_cast<std::int64_t>(
      std::bit_ceil(static_cast<std::uint64_t>(communicator.most_channels)));
  double in_node[2] = {0, 0}, between[2] = {0, 0};  // sent, received
  std::int64_t channels[2] = {0, 0};
  for (const CollectiveCall& pair : pairs) {
    const int way = pair.kind == CollectiveKind::send ? 0 : 1;
    (pair.leaves_node ? between : in_node)[way] += pair.bytes;
    channels[way] += channels_of_pair(pair.bytes, all, communicator);
  }
  // Both directions at once: a send and a receive share a channel.
  const std::int64_t wanted = std::max(channels[0], channels[1]);
  CollectiveCost cost;
  cost.channels = std::min(all, wanted);
  const auto used = static_cast<double>(cost.channels);
  const double rounds =
      std::ceil(static_cast<double>(wanted) / used / kPairsAtOnce);
  const double here = std::max(in_node[0], in_node[1]);
  const double away = std::max(between[0], between[1]);
  const double through_channels =
      (here + away) / (used * network.channel_bandwidth);
  cost.seconds = std::numeric_limits<double>::infinity();
  for (const Protocol& protocol : network.rings) {
    const double hop =
        away > 0 ? protocol.hop_between_nodes : protocol.hop_in_node;
    const double over_links =
        here / payload_bandwidth(network.bandwidth_in_node, {2, 1}, protocol);
    const double over_network =
        away /
        payload_bandwidth(network.bandwidth_between_nodes, {2, 2}, protocol);
    const double sending =
        std::max({over_links, over_network, through_channels});
    const double seconds = protocol.base_latency + hop * rounds + sending;
    if (seconds >= cost.seconds) continue;
    cost.seconds = seconds;
    cost.link = over_network > over_links ? Link::between_nodes : Link::in_node;
    cost.link_seconds = std::max(over_links, over_network);
  }
  return cost;
}

// NCCL drains collectives before pairs (ncclLaunchPrepare in src/enqueue.cc).
void add(CollectiveCost& sum, const CollectiveCost& more) {
  sum.seconds += more.seconds;
  sum.channels = std::max(sum.channels, more.channels);
  if (more.link_seconds > sum.link_seconds) sum.link = more.link;
  sum.link_seconds = std::max(sum.link_seconds, more.link_seconds);
}

}  // namespace

std::string_view name_of(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::all_gather:
      return "all-gather";
    case CollectiveKind::reduce_scatter:
      return "reduce-scatter";
    case CollectiveKind::all_reduce:
      return "all-reduce";
    case CollectiveKind::broadcast:
      return "broadcast";
    case CollectiveKind::all_to_all:
      return "all-to-all";
    case CollectiveKind::send:
      return "send";
    case CollectiveKind::receive:
      return "receive";
  }
  return "";
}

Placement place(const std::vector<std::int64_t>& ranks,
                std::int64_t ranks_per_node) {
  std::set<std::int64_t> nodes;
  for (const auto rank : ranks) nodes.insert(rank / ranks_per_node);
  return {static_cast<std::int64_t>(ranks.size()),
          static_cast<std::int64_t>(nodes.size())};
}

double collective_seconds(CollectiveKind kind, double bytes,
                          const Placement& placement, const Network& network) {
  if (placement.num_ranks <= 1) return 0;
  double fastest = std::numeric_limits<double>::infinity();
  for (const Way& way : ways_of(kind, bytes, placement, network)) {
    fastest = std::min(fastest, way.seconds());
  }
  return fastest;
}

CollectiveCost group_cost(const std::vector<CollectiveCall>& calls,
                          const Placement& placement, const Network& network,
                          std::int64_t most_channels) {
  CollectiveCost cost;
  for (const CollectiveCall& call : calls) cost.bytes += call.bytes;
  if (placement.num_ranks <= 1) return cost;
  const Communicator communicator{placement, network,
                                  most_of(placement, network, most_channels)};
  std::map<CollectiveKind, Operations> kinds;
  std::vector<CollectiveCall> pairs;
  for (const CollectiveCall& call : calls) {
    cost.traffic += traffic_of(call, placement);
    if (call.kind == CollectiveKind::all_to_all) {
      add_pairs_of(call, placement, pairs);
    } else if (is_of_pair(call.kind)) {
      pairs.push_back(call);
    } else {
      ++kinds[call.kind].number;
      kinds[call.kind].bytes += call.bytes;
    }
  }
  if (!kinds.empty()) add(cost, collectives_cost(kinds, communicator));
  if (!pairs.empty()) add(cost, pairs_cost(pairs, communicator));
  return cost;
}

}  // namespace lowtide::phantom
