#include "phantom/time/ways.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace lowtide::phantom {
namespace {

// Steps of the ring, and passes of the buffer over it.
struct Ring {
  double steps;
  double passes;
};

Ring ring_of(CollectiveKind kind, double ranks) {
  switch (kind) {
    case CollectiveKind::all_gather:
    case CollectiveKind::reduce_scatter:
      return {ranks - 1, (ranks - 1) / ranks};
    case CollectiveKind::all_reduce:
      return {2 * (ranks - 1), 2 * (ranks - 1) / ranks};
    case CollectiveKind::broadcast:
      return {ranks - 1, 1};
    case CollectiveKind::all_to_all:
      return {1, (ranks - 1) / ranks};
    case CollectiveKind::send:
    case CollectiveKind::receive:
      return {1, 1};
  }
  return {0, 0};
}

// Every network card of a node carries a ring of its own, so the ring of a
// node's ranks has all of them; between pairs a rank has its own card alone.
double link_bandwidth(CollectiveKind kind, const Placement& placement,
                      const Network& network) {
  if (placement.num_nodes <= 1) return network.bandwidth_in_node;
  const bool pairs = kind == CollectiveKind::all_to_all ||
                     kind == CollectiveKind::send ||
                     kind == CollectiveKind::receive;
  const double cards = pairs ? 1
                             : static_cast<double>(placement.num_ranks) /
                                   static_cast<double>(placement.num_nodes);
  return std::min(network.bandwidth_in_node,
                  cards * network.bandwidth_between_nodes);
}

double hop_in_node(const Placement& placement, const Protocol& protocol) {
  return placement.num_nodes > 1 ? protocol.hop_beside_network
                                 : protocol.hop_in_node;
}

double hop_between_nodes(const Placement& placement, const Protocol& protocol) {
  return placement.num_nodes < placement.num_ranks
             ? protocol.hop_between_nodes
             : std::max(protocol.hop_between_nodes, protocol.hop_of_lone_ranks);
}

Way with_bytes(Way way, double carried, CollectiveKind kind,
               const Placement& placement, const Network& network) {
  const double link = link_bandwidth(kind, placement, network);
  const double share = placement.num_nodes > 1
                           ? way.protocol->share_between_nodes
                           : way.protocol->share_in_node;
  way.carried = carried;
  way.sending = carried / payload_bandwidth(link, placement, *way.protocol);
  way.link_seconds = carried / (link * share);
  return way;
}

Way by_ring(CollectiveKind kind, double bytes, const Placement& placement,
            const Network& network, const Protocol& protocol) {
  const auto ranks = static_cast<double>(placement.num_ranks);
  const auto nodes = static_cast<double>(placement.num_nodes);
  const Ring ring = ring_of(kind, ranks);
  const double between = ring.steps * (nodes - 1) / (ranks - 1);
  Way way;
  way.protocol = &protocol;
  way.base = protocol.base_latency;
  way.hops = (ring.steps - between) * hop_in_node(placement, protocol) +
             between * hop_between_nodes(placement, protocol);
  return with_bytes(way, ring.passes * bytes, kind, placement, network);
}

// Up and down: a chain in every node, a binary tree of the nodes.
Way by_tree(double bytes, const Placement& placement, const Network& network,
            const Protocol& protocol) {
  const auto ranks = static_cast<double>(placement.num_ranks);
  const auto nodes = static_cast<double>(placement.num_nodes);
  Way way;
  way.protocol = &protocol;
  way.base = protocol.base_latency;
  way.hops = 2 * ((ranks / nodes - 1) * hop_in_node(placement, protocol) +
                  std::ilogb(nodes) * hop_between_nodes(placement, protocol));
  return with_bytes(way, 2 * bytes, CollectiveKind::all_reduce, placement,
                    network);
}

}  // namespace

double payload_bandwidth(double link, const Placement& placement,
                         const Protocol& protocol) {
  const double share = placement.num_nodes > 1 ? protocol.share_between_nodes
                                               : protocol.share_in_node;
  const auto most = static_cast<std::size_t>(
      std::min<std::int64_t>(placement.num_nodes, 3) - 1);
  return std::min(link * share, protocol.most[most]);
}

std::vector<Way> ways_of(CollectiveKind kind, double bytes,
                         const Placement& placement, const Network& network) {
  std::vector<Way> ways;
  for (const Protocol& protocol : network.rings) {
    ways.push_back(by_ring(kind, bytes, placement, network, protocol));
  }
  if (kind != CollectiveKind::all_reduce) return ways;
  for (const Protocol& protocol : network.trees) {
    ways.push_back(by_tree(bytes, placement, network, protocol));
  }
  return ways;
}

}  // namespace lowtide::phantom
