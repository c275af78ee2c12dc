#include "phantom/time/costs.h"

#include <gtest/gtest.h>

namespace lowtide::phantom {
namespace {

Accelerator accelerator() {
  Accelerator a;
  a.peak_flops = {1e12, 2e12, 4e12, 8e12, 16e12};
  a.memory_bandwidth = 1e12;
  a.product_efficiency = 0.5;
  a.attention_efficiency = 0.25;
  a.memory_efficiency = 0.8;
  a.kernel_floor = 1e-6;
  return a;
}

Network network() {
  Network n;
  n.bandwidth_in_node = 100e9;
  n.bandwidth_between_nodes = 10e9;
  n.ranks_per_node = 8;
  n.rings = {{8e-6, 2e-6, 2e-6, 10e-6, 1.0, 1.0, {1e15, 1e15, 1e15}},
             {5e-6, 1e-6, 1.5e-6, 3e-6, 0.5, 0.25, {40e9, 30e9, 5e9}}};
  n.trees = {{6e-6, 1e-6, 1e-6, 5e-6, 0.5, 0.25, {40e9, 30e9, 20e9}}};
  return n;
}

TEST(KernelCostTest, IsTheLongerOfComputingAndMoving) {
  const Accelerator a = accelerator();
  // 8e9 / (8e12 / 2) = 2 ms; 1.6e9 / 0.8e12 = 2 ms.
  EXPECT_DOUBLE_EQ(kernel_seconds({8e9, 1.0, Rate::half}, a), 2e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({8e9, 3.2e9, Rate::half}, a), 4e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({0, 1.6e9}, a), 2e-3);
}

TEST(KernelCostTest, EveryRateHasItsPeakAndAttentionItsEfficiency) {
  const Accelerator a = accelerator();
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::fp64}, a), 2e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::fp32}, a), 1e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::tf32}, a), 0.5e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::eight_bit}, a), 0.125e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::half, true}, a), 0.5e-3);
}

TEST(KernelCostTest, NoKernelIsShorterThanTheFloor) {
  EXPECT_DOUBLE_EQ(kernel_seconds({}, accelerator()), 1e-6);
  EXPECT_DOUBLE_EQ(kernel_seconds({0, 100}, accelerator()), 1e-6);
}

TEST(PlacementTest, CountsTheNodesOfAGroup) {
  EXPECT_EQ(place({0, 1, 2, 3}, 8).num_nodes, 1);
  EXPECT_EQ(place({0, 8, 16, 24}, 8).num_nodes, 4);
  EXPECT_EQ(place({6, 7, 8, 9}, 8).num_nodes, 2);
  EXPECT_EQ(place({6, 7, 8, 9}, 8).num_ranks, 4);
}

TEST(CollectiveCostTest, InANodeIsALatencyOfTheRingAndItsBytes) {
  // 8 + 7 * 2 = 22 us; 7/8 of 800 MB at 100 GB/s = 7 ms.
  const Placement node{8, 1};
  EXPECT_DOUBLE_EQ(
      collective_seconds(CollectiveKind::all_gather, 800e6, node, network()),
      7.022e-3);
  EXPECT_DOUBLE_EQ(collective_seconds(CollectiveKind::reduce_scatter, 800e6,
                                      node, network()),
                   7.022e-3);
  // Twice the steps and the bytes: 8 + 14 * 2 = 36 us.
  EXPECT_DOUBLE_EQ(
      collective_seconds(CollectiveKind::all_reduce, 800e6, node, network()),
      14.036e-3);
}

TEST(CollectiveCostTest, SmallOnesTakeTheProtocolOfLessLatency) {
  // 5 + 7 * 1 = 12 us; 700 B at min(50, 40) GB/s.
  EXPECT_DOUBLE_EQ(
      collective_seconds(CollectiveKind::all_gather, 800, {8, 1}, network()),
      12e-6 + 700 / 40e9);
}

TEST(CollectiveCostTest, ASmallAllReduceTakesATree) {
  // 32 ranks of 4 nodes: 6 + 2 * (7 * 1 + 2 * 5) = 40 us; the ring needs
  // 5 + 2 * (28 * 1.5 + 3 * 3) = 107 us.
  EXPECT_NEAR(
      collective_seconds(CollectiveKind::all_reduce, 4, {32, 4}, network()),
      40e-6, 1e-9);
}

TEST(CollectiveCostTest, StepsInANodeMayBeSlowerBesideTheNetwork) {
  // 15 steps of 16 ranks in 2 nodes: 5 + 14 * 1.5 + 3 = 29 us, 4 B.
  EXPECT_NEAR(
      collective_seconds(CollectiveKind::all_gather, 4, {16, 2}, network()),
      29e-6, 1e-9);
}

TEST(CollectiveCostTest, BetweenNodesTheRingHasAllNetworkCardsOfANode) {
  // 15 steps, one of them between nodes: 8 + 14 * 2 + 10 = 46 us; 15/16 of
  // 1.6 GB at 8 * 10 GB/s.
  EXPECT_DOUBLE_EQ(collective_seconds(CollectiveKind::reduce_scatter, 1.6e9,
                                      {16, 2}, network()),
                   46e-6 + 1.5e9 / 80e9);
  // One rank a node: one card. 3 steps, all between nodes.
  EXPECT_DOUBLE_EQ(collective_seconds(CollectiveKind::reduce_scatter, 4e9,
                                      {4, 4}, network()),
                   38e-6 + 3e9 / 10e9);
}

TEST(CollectiveCostTest, APairHasOneCard) {
  EXPECT_DOUBLE_EQ(
      collective_seconds(CollectiveKind::send, 1e9, {16, 2}, network()),
      8e-6 + (14.0 / 15) * 2e-6 + (1.0 / 15) * 10e-6 + 0.1);
}

TEST(CollectiveCostTest, ManySmallOnesPayTheirLatencyOften) {
  const Placement node{8, 1};
  const auto once =
      collective_seconds(CollectiveKind::all_gather, 800e6, node, network());
  const auto each =
      collective_seconds(CollectiveKind::all_gather, 200e6, node, network());
  EXPECT_NEAR(4 * each - once, 3 * 22e-6, 1e-12);
}

TEST(CollectiveCostTest, AloneIsFree) {
  EXPECT_EQ(
      collective_seconds(CollectiveKind::all_reduce, 1e9, {1, 1}, network()),
      0);
}

}  // namespace
}  // namespace lowtide::phantom
