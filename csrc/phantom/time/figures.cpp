#include "phantom/time/figures.h"

#include <cstdint>
#include <stdexcept>
#include <string>

namespace lowtide::phantom {
namespace {

class Reader {
 public:
  explicit Reader(std::span<const double> figures) : left_(figures) {}

  void operator()(double& figure) { figure = next(); }
  void operator()(std::int64_t& figure) {
    figure = static_cast<std::int64_t>(next());
  }
  void expect_end() const {
    if (left_.empty()) return;
    throw std::invalid_argument(
        "lowtide: machine_of: expected a machine's figures and no more, got " +
        std::to_string(left_.size()) +
        " more. Make them with lowtide.phantom.machines.flat.");
  }

 private:
  double next() {
    if (left_.empty()) {
      throw std::invalid_argument(
          "lowtide: machine_of: expected all of a machine's figures, got "
          "fewer. "
          "Make them with lowtide.phantom.machines.flat.");
    }
    const double figure = left_.front();
    left_ = left_.subspan(1);
    return figure;
  }

  std::span<const double> left_;
};

template <typename... Figures>
void read(Reader& reader, Figures&... figures) {
  (reader(figures), ...);
}

void read(Reader& reader, Accelerator& of) {
  for (double& peak : of.peak_flops) reader(peak);
  read(reader, of.memory_bandwidth, of.product_efficiency,
       of.attention_efficiency, of.memory_efficiency, of.kernel_floor,
       of.host_bandwidth, of.block_seconds, of.multiprocessors,
       of.resident_blocks);
}

void read(Reader& reader, Protocol& of) {
  read(reader, of.base_latency, of.hop_in_node, of.hop_beside_network,
       of.hop_between_nodes, of.hop_of_lone_ranks, of.share_in_node,
       of.share_between_nodes);
  for (double& most : of.most) reader(most);
  read(reader, of.channel_bytes, of.channel_bytes_by_ranks);
}

void read(Reader& reader, Network& of) {
  read(reader, of.bandwidth_in_node, of.bandwidth_between_nodes,
       of.channel_bandwidth, of.ranks_per_node, of.channels_in_node,
       of.channels_between_nodes, of.channels_of_pair_in_node,
       of.channels_of_pair_between_nodes);
  for (auto* protocols : {&of.rings, &of.trees}) {
    std::int64_t count = 0;
    reader(count);
    for (std::int64_t i = 0; i < count; ++i) {
      read(reader, protocols->emplace_back());
    }
  }
}

void read(Reader& reader, Host& of) {
  read(reader, of.launch, of.library_call, of.collective, of.event, of.graph);
}

}  // namespace

Machine machine_of(std::span<const double> figures) {
  Reader reader(figures);
  Machine machine;
  read(reader, machine.accelerator);
  read(reader, machine.network);
  read(reader, machine.host);
  reader.expect_end();
  return machine;
}

}  // namespace lowtide::phantom
