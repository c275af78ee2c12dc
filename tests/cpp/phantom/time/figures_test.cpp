#include "phantom/time/figures.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace lowtide::phantom {
namespace LOWTIDE_FILE {

// 22 figures, one ring of 12, no tree, five of the host.
std::vector<double> counted() {
  std::vector<double> figures(41);
  std::iota(figures.begin(), figures.end(), 1);
  figures[22] = 1;
  figures[35] = 0;
  return figures;
}

std::string complaint(const std::vector<double>& figures) {
  try {
    machine_of(figures);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(FiguresTest, EachHasItsPlace) {
  const Machine machine = machine_of(counted());
  const Accelerator& a = machine.accelerator;
  EXPECT_EQ(a.peak_flops, (std::array<double, 5>{1, 2, 3, 4, 5}));
  EXPECT_EQ(a.memory_bandwidth, 6);
  EXPECT_EQ(a.product_efficiency, 7);
  EXPECT_EQ(a.attention_efficiency, 8);
  EXPECT_EQ(a.memory_efficiency, 9);
  EXPECT_EQ(a.kernel_floor, 10);
  EXPECT_EQ(a.host_bandwidth, 11);
  EXPECT_EQ(a.block_seconds, 12);
  EXPECT_EQ(a.multiprocessors, 13);
  EXPECT_EQ(a.resident_blocks, 14);
  const Network& n = machine.network;
  EXPECT_EQ(n.bandwidth_in_node, 15);
  EXPECT_EQ(n.bandwidth_between_nodes, 16);
  EXPECT_EQ(n.channel_bandwidth, 17);
  EXPECT_EQ(n.ranks_per_node, 18);
  EXPECT_EQ(n.channels_in_node, 19);
  EXPECT_EQ(n.channels_between_nodes, 20);
  EXPECT_EQ(n.channels_of_pair_in_node, 21);
  EXPECT_EQ(n.channels_of_pair_between_nodes, 22);
  ASSERT_EQ(n.rings.size(), 1U);
  EXPECT_TRUE(n.trees.empty());
  const Protocol& p = n.rings[0];
  EXPECT_EQ(p.base_latency, 24);
  EXPECT_EQ(p.hop_in_node, 25);
  EXPECT_EQ(p.hop_beside_network, 26);
  EXPECT_EQ(p.hop_between_nodes, 27);
  EXPECT_EQ(p.hop_of_lone_ranks, 28);
  EXPECT_EQ(p.share_in_node, 29);
  EXPECT_EQ(p.share_between_nodes, 30);
  EXPECT_EQ(p.most, (std::array<double, 3>{31, 32, 33}));
  EXPECT_EQ(p.channel_bytes, 34);
  EXPECT_EQ(p.channel_bytes_by_ranks, 35);
  const Host& h = machine.host;
  EXPECT_EQ(h.launch, 37);
  EXPECT_EQ(h.library_call, 38);
  EXPECT_EQ(h.collective, 39);
  EXPECT_EQ(h.event, 40);
  EXPECT_EQ(h.graph, 41);
}

TEST(FiguresTest, ACountThatDoesNotFitIsRefused) {
  auto figures = counted();
  figures.push_back(1);
  EXPECT_EQ(
      complaint(figures),
      "lowtide: machine_of: expected a machine's figures and no more, got "
      "1 more. Make them with lowtide.phantom.machines.flat.");
  figures.resize(40);
  EXPECT_EQ(complaint(figures),
            "lowtide: machine_of: expected all of a machine's figures, got "
            "fewer. Make them with lowtide.phantom.machines.flat.");
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::phantom
