#include "phantom/time/costs.h"

#include <algorithm>
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
  const auto ranks = static_cast<double>(placement.num_ranks);
  const auto nodes = static_cast<double>(placement.num_nodes);
  const Ring ring = ring_of(kind, ranks);
  const double between =
      nodes <= 1 ? 0
                 : std::min(ring.steps, ring.steps * (nodes - 1) / (ranks - 1));
  const double bandwidth = link_bandwidth(kind, placement, network);
  const auto most = static_cast<std::size_t>(
      std::min<std::int64_t>(placement.num_nodes, 3) - 1);
  double fastest = std::numeric_limits<double>::infinity();
  for (const Protocol& protocol : network.protocols) {
    const double share =
        nodes > 1 ? protocol.share_between_nodes : protocol.share_in_node;
    const double latency = protocol.base_latency +
                           (ring.steps - between) * protocol.hop_in_node +
                           between * protocol.hop_between_nodes;
    const double payload = std::min(bandwidth * share, protocol.most[most]);
    fastest = std::min(fastest, latency + ring.passes * bytes / payload);
  }
  return fastest;
}

}  // namespace lowtide::phantom
