// What collectives cost, in hand-computed numbers.
#include "phantom/time/collectives.h"

#include <gtest/gtest.h>

#include <vector>

#include "shard/policy.h"

namespace lowtide::phantom {
namespace LOWTIDE_FILE {

constexpr double kMicro = 1e-6;
constexpr Placement kNode{8, 1}, kTwoNodes{8, 2};

// Two protocols on 16 channels: one of much latency whose channels take 32 KiB
// each, one of little whose channels take 4 KiB times the ranks.
Network network() {
  Network n;
  n.bandwidth_in_node = 100e9;
  n.bandwidth_between_nodes = 10e9;
  n.ranks_per_node = 8;
  n.channels_in_node = 16;
  n.channels_between_nodes = 8;
  n.channels_of_pair_in_node = 16;
  n.channels_of_pair_between_nodes = 2;
  Protocol wide{8e-6, 2e-6, 2e-6, 10e-6, 0, 1.0, 1.0, {1e15, 1e15, 1e15}};
  wide.channel_bytes = 32768;
  Protocol quick{5e-6, 1e-6, 1.5e-6, 3e-6, 0, 0.5, 0.25, {40e9, 30e9, 5e9}};
  quick.channel_bytes_by_ranks = 4096;
  n.rings = {wide, quick};
  n.trees = {{6e-6, 1e-6, 1e-6, 5e-6, 0, 0.5, 0.25, {40e9, 30e9, 20e9}}};
  return n;
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

TEST(CollectiveCostTest, LoneRanksOfNodesMayHaveSlowerHops) {
  Network slow = network();
  for (Protocol& ring : slow.rings) ring.hop_of_lone_ranks = 20e-6;
  // Four nodes of one rank: 5 + 3 * 20 us. Four nodes of two: 5 + 4 * 1.5 +
  // 3 * 3 us.
  EXPECT_NEAR(collective_seconds(CollectiveKind::all_gather, 4, {4, 4}, slow),
              65e-6, 1e-8);
  EXPECT_NEAR(collective_seconds(CollectiveKind::all_gather, 4, {8, 4}, slow),
              20e-6, 1e-8);
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

// -- groups -------------------------------------------------------------------

// Of lowtide's gathers: what an entry is worth that leaves the group and is
// copied out of the packed one instead.
TEST(CollectiveCostTest, APackedEntrySavesManyTimesItsCopy) {
  constexpr double kMemory = 3e12, kLarge = 50e6;
  Network dgx = network();
  dgx.bandwidth_in_node = 371e9;
  dgx.bandwidth_between_nodes = 48e9;
  dgx.channels_between_nodes = 16;
  dgx.channel_bandwidth = 25e9;
  dgx.rings = {{14e-6, 1.9e-6, 1.9e-6, 4e-6, 0, 0.92, 0.92, {}}};
  dgx.rings[0].most = {440e9, 294e9, 232e9};
  dgx.rings[0].channel_bytes = 5120;
  for (const std::int64_t ranks : {16, 64, 128, 512}) {
    const auto packed = static_cast<double>(shard::packed_bytes(ranks));
    const auto seconds = [&](std::vector<double> entries) {
      std::vector<CollectiveCall> calls(7,
                                        {CollectiveKind::all_gather, kLarge});
      for (const double bytes : entries) {
        calls.push_back({CollectiveKind::all_gather, bytes});
      }
      return group_cost(calls, {ranks, ranks / 8}, dgx).seconds;
    };
    const double saved = seconds({packed, packed}) - seconds({2 * packed});
    EXPECT_GT(saved, 7 * 2 * packed / kMemory) << ranks;
  }
}

CollectiveCost all_gathers(int number, double bytes, const Network& network,
                           std::int64_t most_channels = 0) {
  const std::vector<CollectiveCall> calls(static_cast<std::size_t>(number),
                                          {CollectiveKind::all_gather, bytes});
  return group_cost(calls, kNode, network, most_channels);
}

TEST(GroupCostTest, OfOneIsThatOfTheCollective) {
  const CollectiveCost cost = all_gathers(1, 800e6, network());
  EXPECT_DOUBLE_EQ(cost.seconds, 7.022e-3);
  EXPECT_DOUBLE_EQ(cost.seconds, collective_seconds(CollectiveKind::all_gather,
                                                    800e6, kNode, network()));
  EXPECT_EQ(cost.channels, 16);
  EXPECT_EQ(cost.bytes, 800e6);
  EXPECT_EQ(cost.link, Link::in_node);
  EXPECT_DOUBLE_EQ(cost.link_seconds, 7e-3);
}

TEST(GroupCostTest, BetweenNodesItFillsTheNetwork) {
  const CollectiveCost cost = group_cost(
      {{CollectiveKind::reduce_scatter, 800e6}}, kTwoNodes, network());
  EXPECT_EQ(cost.link, Link::between_nodes);
  EXPECT_EQ(cost.channels, 8);
  // 700 MB by four cards of 10 GB/s.
  EXPECT_DOUBLE_EQ(cost.link_seconds, 17.5e-3);
}

TEST(GroupCostTest, OneRankAloneTakesNothing) {
  const CollectiveCost cost =
      group_cost({{CollectiveKind::all_reduce, 100}}, {1, 1}, network());
  EXPECT_EQ(cost.seconds, 0);
  EXPECT_EQ(cost.channels, 0);
  EXPECT_EQ(cost.traffic, 0);
  EXPECT_EQ(cost.bytes, 100);
}

TEST(GroupCostTest, FewBytesTakeFewChannels) {
  EXPECT_EQ(all_gathers(1, 1000, network()).channels, 1);
  EXPECT_EQ(all_gathers(1, 65536, network()).channels, 2);  // 32 KiB each
  EXPECT_EQ(all_gathers(1, 98303, network()).channels, 2);
}

TEST(GroupCostTest, TheCommunicatorsLimitHolds) {
  EXPECT_EQ(all_gathers(1, 800e6, network(), 4).channels, 4);
  EXPECT_EQ(all_gathers(1, 800e6, network(), 64).channels, 16);
  EXPECT_EQ(all_gathers(9, 1000, network(), 4).channels, 4);
}

TEST(GroupCostTest, FewChannelsCarryLess) {
  Network narrow = network();
  narrow.channel_bandwidth = 10e9;
  EXPECT_DOUBLE_EQ(all_gathers(1, 800e6, narrow).seconds, 7.022e-3);
  const CollectiveCost cost = all_gathers(1, 800e6, narrow, 4);
  EXPECT_DOUBLE_EQ(cost.seconds, 22 * kMicro + 700e6 / 40e9);
  // The rest of the link is free for others.
  EXPECT_DOUBLE_EQ(cost.link_seconds, 7e-3);
}

TEST(GroupCostTest, LatencyCountsOncePerOperationOnAChannel) {
  // 33 operations on 16 channels: 3 on each. 8 + 3 * 7 * 2 us, and 33 * 70 MB.
  EXPECT_DOUBLE_EQ(all_gathers(33, 80e6, network()).seconds,
                   50 * kMicro + 33 * 70e6 / 100e9);
  // Two on two channels: 1.5 on each. 5 + 1.5 * 7 us at 40 GB/s.
  const CollectiveCost two = all_gathers(2, 1000, network());
  EXPECT_EQ(two.channels, 2);
  EXPECT_DOUBLE_EQ(two.seconds, 15.5 * kMicro + 1750 / 40e9);
}

TEST(GroupCostTest, AGroupIsQuickerThanItsOperationsOneByOne) {
  const double together = all_gathers(10, 8e6, network()).seconds;
  const double apart = 10 * all_gathers(1, 8e6, network()).seconds;
  // 8 + 14 * (1 + 9 / 16) instead of 10 * 22 us.
  EXPECT_NEAR(apart - together, (220 - 29.875) * kMicro, 1e-12);
}

TEST(GroupCostTest, NcclChoosesByTheLatencyOfItsFullestChannel) {
  // 3.2 MB at once: 8 + 14 us + 28 us beside 5 + 7 us + 70 us.
  EXPECT_DOUBLE_EQ(all_gathers(1, 3.2e6, network()).seconds,
                   22 * kMicro + 2.8e6 / 100e9);
  // In 320 operations it counts the latency 20 times, 440 + 28 us beside
  // 240 + 70 us; a channel works on 20.9375.
  EXPECT_DOUBLE_EQ(all_gathers(320, 10e3, network()).seconds,
                   5 * kMicro + 7 * kMicro * 20.9375 + 2.8e6 / 40e9);
}

TEST(GroupCostTest, KindsShareTheChannels) {
  const CollectiveCost cost = group_cost({{CollectiveKind::all_gather, 800e6},
                                          {CollectiveKind::all_reduce, 800e6}},
                                         kNode, network());
  EXPECT_EQ(cost.channels, 16);
  // 7 and 14 steps of 2 us, 21 us on average; 7 and 14 ms.
  EXPECT_DOUBLE_EQ(cost.seconds,
                   8 * kMicro + 21 * kMicro * (1 + 1.0 / 16) + 21e-3);
  EXPECT_DOUBLE_EQ(cost.link_seconds, 21e-3);
}

TEST(GroupCostTest, TrafficIsWhatIsReadAndWritten) {
  const auto traffic = [](CollectiveKind kind) {
    return group_cost({{kind, 800}}, kNode, network()).traffic;
  };
  EXPECT_EQ(traffic(CollectiveKind::all_gather), 900);
  EXPECT_EQ(traffic(CollectiveKind::reduce_scatter), 900);
  EXPECT_EQ(traffic(CollectiveKind::all_reduce), 1600);
  EXPECT_EQ(traffic(CollectiveKind::broadcast), 800);
  EXPECT_EQ(traffic(CollectiveKind::all_to_all), 1600);
  EXPECT_EQ(traffic(CollectiveKind::send), 800);
  EXPECT_EQ(traffic(CollectiveKind::receive), 800);
}

// -- between two ranks --------------------------------------------------------

TEST(PairCostTest, ASendTakesOneHopAndTheLink) {
  const CollectiveCost cost =
      group_cost({{CollectiveKind::send, 1e9}}, kNode, network());
  EXPECT_DOUBLE_EQ(cost.seconds, 10 * kMicro + 10e-3);
  EXPECT_EQ(cost.link, Link::in_node);
  EXPECT_DOUBLE_EQ(cost.link_seconds, 10e-3);
}

TEST(PairCostTest, ASendToAnotherNodeTakesItsOwnCard) {
  const CollectiveCost cost =
      group_cost({{CollectiveKind::send, 1e9, /*leaves_node=*/true}}, kTwoNodes,
                 network());
  EXPECT_DOUBLE_EQ(cost.seconds, 18 * kMicro + 100e-3);
  EXPECT_EQ(cost.link, Link::between_nodes);
  EXPECT_EQ(cost.channels, 2);
}

TEST(PairCostTest, LinksCarryBothDirectionsAtOnce) {
  const CollectiveCost cost =
      group_cost({{CollectiveKind::send, 1e9}, {CollectiveKind::receive, 1e9}},
                 kNode, network());
  EXPECT_DOUBLE_EQ(cost.seconds, 10 * kMicro + 10e-3);
  EXPECT_EQ(cost.bytes, 2e9);
  const CollectiveCost small = group_cost(
      {{CollectiveKind::send, 1000}, {CollectiveKind::receive, 1000}}, kNode,
      network());
  EXPECT_EQ(small.channels, 1);
}

TEST(PairCostTest, BytesDecideTheChannels) {
  const auto channels = [](double bytes) {
    return group_cost({{CollectiveKind::send, bytes}}, kNode, network())
        .channels;
  };
  EXPECT_EQ(channels(1000), 1);
  EXPECT_EQ(channels(65537), 2);  // parts of 64 KiB
  EXPECT_EQ(channels(1e6), 2);    // 16 channels for eight ranks
  EXPECT_EQ(channels(33e6), 2);   // of 16 MiB each
  EXPECT_EQ(channels(34e6), 4);
  EXPECT_EQ(channels(1e9), 16);  // all there are
}

TEST(PairCostTest, AnAllToAllIsASendAndAReceiveForEachPeer) {
  // 1 MB to each: three in the node, four by the card.
  const CollectiveCost cost =
      group_cost({{CollectiveKind::all_to_all, 8e6}}, kTwoNodes, network());
  EXPECT_DOUBLE_EQ(cost.seconds, 18 * kMicro + 4e6 / 10e9);
  EXPECT_EQ(cost.channels, 8);  // seven peers, two channels each
  EXPECT_EQ(cost.bytes, 8e6);
  const CollectiveCost in_node =
      group_cost({{CollectiveKind::all_to_all, 80e6}}, kNode, network());
  EXPECT_DOUBLE_EQ(in_node.seconds, 10 * kMicro + 70e6 / 100e9);
}

TEST(PairCostTest, AChannelWorksOnEightAtOnce) {
  // 200 small sends on 16 channels are 12.5 on each: two rounds of a hop.
  const std::vector<CollectiveCall> sends(200, {CollectiveKind::send, 1000});
  EXPECT_DOUBLE_EQ(group_cost(sends, kNode, network()).seconds,
                   7 * kMicro + 200e3 / 40e9);
}

TEST(PairCostTest, CollectivesOfTheGroupComeFirst) {
  const CollectiveCost cost = group_cost(
      {{CollectiveKind::all_gather, 800e6}, {CollectiveKind::send, 1000}},
      kNode, network());
  EXPECT_DOUBLE_EQ(cost.seconds, 7.022e-3 + 6 * kMicro + 1000 / 40e9);
  EXPECT_EQ(cost.channels, 16);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::phantom
