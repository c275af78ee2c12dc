#include "phantom/time/costs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

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
      return {1, 1};
  }
  return {0, 0};
}

// Every network card of a node carries a ring of its own, so the ring of a
// node's ranks has all of them; between pairs a rank has its own card alone.
double link_bandwidth(CollectiveKind kind, const Placement& placement,
                      const Network& network) {
  if (placement.num_nodes <= 1) return network.bandwidth_in_node;
  const bool pairs =
      kind == CollectiveKind::all_to_all || kind == CollectiveKind::send;
  const double cards = pairs ? 1
                             : static_cast<double>(placement.num_ranks) /
                                   static_cast<double>(placement.num_nodes);
  return std::min(network.bandwidth_in_node,
                  cards * network.bandwidth_between_nodes);
}

double payload_bandwidth(double link, const Placement& placement,
                         const Protocol& protocol) {
  const double share = placement.num_nodes > 1 ? protocol.share_between_nodes
                                               : protocol.share_in_node;
  const auto most = static_cast<std::size_t>(
      std::min<std::int64_t>(placement.num_nodes, 3) - 1);
  return std::min(link * share, protocol.most[most]);
}

double hop_in_node(const Placement& placement, const Protocol& protocol) {
  return placement.num_nodes > 1 ? protocol.hop_beside_network
                                 : protocol.hop_in_node;
}

double by_ring(CollectiveKind kind, double bytes, const Placement& placement,
               const Network& network, const Protocol& protocol) {
  const auto ranks = static_cast<double>(placement.num_ranks);
  const auto nodes = static_cast<double>(placement.num_nodes);
  const Ring ring = ring_of(kind, ranks);
  const double between = ring.steps * (nodes - 1) / (ranks - 1);
  const double latency =
      protocol.base_latency +
      (ring.steps - between) * hop_in_node(placement, protocol) +
      between * protocol.hop_between_nodes;
  const double link = link_bandwidth(kind, placement, network);
  return latency +
         ring.passes * bytes / payload_bandwidth(link, placement, protocol);
}

// Up and down: a chain in every node, a binary tree of the nodes.
double by_tree(double bytes, const Placement& placement, const Network& network,
               const Protocol& protocol) {
  const auto ranks = static_cast<double>(placement.num_ranks);
  const auto nodes = static_cast<double>(placement.num_nodes);
  const double latency =
      protocol.base_latency +
      2 * ((ranks / nodes - 1) * hop_in_node(placement, protocol) +
           std::floor(std::log2(nodes)) * protocol.hop_between_nodes);
  const double link =
      link_bandwidth(CollectiveKind::all_reduce, placement, network);
  return latency + 2 * bytes / payload_bandwidth(link, placement, protocol);
}

}  // namespace

double kernel_seconds(const Work& work, const Accelerator& accelerator) {
  const double peak =
      accelerator.peak_flops[static_cast<std::size_t>(work.rate)] *
      (work.is_attention ? accelerator.attention_efficiency
                         : accelerator.product_efficiency);
  const double computing = work.flops > 0 ? work.flops / peak : 0;
  const double moving = work.bytes / (accelerator.memory_bandwidth *
                                      accelerator.memory_efficiency);
  return std::max({computing, moving, accelerator.kernel_floor});
}

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
  for (const Protocol& protocol : network.rings) {
    fastest =
        std::min(fastest, by_ring(kind, bytes, placement, network, protocol));
  }
  if (kind != CollectiveKind::all_reduce) return fastest;
  for (const Protocol& protocol : network.trees) {
    fastest = std::min(fastest, by_tree(bytes, placement, network, protocol));
  }
  return fastest;
}

}  // namespace lowtide::phantom
