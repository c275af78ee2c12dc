// [Note: Sharing a device], in hand-computed numbers.
#include "phantom/time/multiprocessors.h"

#include <gtest/gtest.h>

#include "phantom/time/device_fixture.h"

namespace lowtide::phantom {
namespace LOWTIDE_FILE {

class SharingTest : public DeviceTest {};

TEST_F(SharingTest, TwoKernelsThatFillTheDeviceHaveHalfOfItEach) {
  compute(kCompute, 3);
  compute(kSide, 1);
  // The short one is done at 2, when 2 s of the long one are left.
  EXPECT_EQ(end_of(kSide), 2);
  EXPECT_EQ(end_of(kCompute), 4);
}

TEST_F(SharingTest, SmallGridsFitBesideEachOther) {
  compute(kCompute, 3, /*blocks=*/120);  // of 200
  compute(kSide, 1, /*blocks=*/80);
  EXPECT_EQ(end_of(kSide), 1);
  EXPECT_EQ(end_of(kCompute), 3);
}

TEST_F(SharingTest, ShareIsByWhatGridsWant) {
  // 1 + 0.25 of the device: 0.8 of what they want each.
  compute(kCompute, 2, /*blocks=*/200);
  compute(kSide, 2, /*blocks=*/50);
  EXPECT_EQ(end_of(kSide), 2.5);
  EXPECT_EQ(end_of(kCompute), 2.5);
}

TEST_F(SharingTest, AGridOfManyWavesWantsNoMoreThanTheDevice) {
  compute(kCompute, 2, /*blocks=*/20000);
  compute(kSide, 2, /*blocks=*/200);
  EXPECT_EQ(end_of(kCompute), 4);
  EXPECT_EQ(end_of(kSide), 4);
}

TEST_F(SharingTest, MovingBytesIsNotSlowerOnHalfOfTheMultiprocessors) {
  compute(kCompute, 2);
  move(kSide, 2);
  EXPECT_EQ(end_of(kSide), 2);
  EXPECT_EQ(end_of(kCompute), 3);  // 1 s done at 2
}

TEST_F(SharingTest, KernelsShareTheMemorysBandwidth) {
  move(kCompute, 3);
  move(kSide, 1);
  EXPECT_EQ(end_of(kSide), 2);
  EXPECT_EQ(end_of(kCompute), 4);
}

TEST_F(SharingTest, BandwidthIsSharedByWhatKernelsAskFor) {
  // Alone, the product moves bytes half of the time.  They ask for 0.5 + 1.
  run(kCompute, {.flops = 2, .bytes = 1}, /*blocks=*/100);
  move(kSide, 2, /*blocks=*/100);
  EXPECT_DOUBLE_EQ(end_of(kCompute), 3);
  EXPECT_DOUBLE_EQ(end_of(kSide), 3);
}

TEST_F(SharingTest, TheFloorIsALatencyAndNotShared) {
  Machine m = round_machine();
  m.accelerator.kernel_floor = 2;
  Simulation small(m);
  small.kernel(kCompute, "small", 0);
  small.kernel(kSide, "small", 0);
  small.finish();
  EXPECT_EQ(small.host(), 2);
}

// -- collectives --------------------------------------------------------------

TEST_F(SharingTest, ACollectiveTakesItsChannelsFromProducts) {
  gather(kSide, {.seconds = 100, .channels = 20});
  compute(kCompute, 8);
  EXPECT_DOUBLE_EQ(end_of(kCompute), 10);  // 100 / 80
  EXPECT_EQ(end_of(kSide), 100);           // it is not slower
}

TEST_F(SharingTest, AProductIsSlowOnlyWhileTheCollectiveRuns) {
  gather(kSide, {.seconds = 5, .channels = 20});
  compute(kCompute, 8);
  EXPECT_DOUBLE_EQ(end_of(kCompute), 9);  // 4 of 8 are done at 5
}

TEST_F(SharingTest, AProductThatFitsBesideItIsNotSlower) {
  gather(kSide, {.seconds = 100, .channels = 20});
  compute(kCompute, 8, /*blocks=*/160);
  EXPECT_EQ(end_of(kCompute), 8);
}

TEST_F(SharingTest, ACollectiveTakesItsTrafficFromTheMemory) {
  gather(kSide, {.seconds = 100, .channels = 20, .traffic = 50});
  move(kCompute, 2);
  EXPECT_DOUBLE_EQ(end_of(kCompute), 4);  // half of the bandwidth is left
  compute(kCompute, 8);
  EXPECT_DOUBLE_EQ(end_of(kCompute), 14);  // products have none of it
}

TEST_F(SharingTest, ACopyTakesItsTrafficFromTheMemory) {
  device.transfer(kSide, "in", 50, Direction::to_device);  // 0.5 a second
  move(kCompute, 2);
  EXPECT_DOUBLE_EQ(end_of(kCompute), 4);
}

TEST_F(SharingTest, CollectivesThatFillALinkShareIt) {
  const CollectiveCost cost{
      .seconds = 4, .link = Link::in_node, .link_seconds = 4};
  gather(kSide, cost);
  gather(kThird, cost, kReplicas);
  EXPECT_EQ(end_of(kSide), 8);
  EXPECT_EQ(end_of(kThird), 8);
}

TEST_F(SharingTest, CollectivesThatLeaveRoomOnTheLinkDoNotSlowEachOther) {
  const CollectiveCost cost{
      .seconds = 4, .link = Link::in_node, .link_seconds = 2};
  gather(kSide, cost);
  gather(kThird, cost, kReplicas);
  EXPECT_EQ(end_of(kSide), 4);
  EXPECT_EQ(end_of(kThird), 4);
}

TEST_F(SharingTest, LinksInANodeAndBetweenNodesAreApart) {
  gather(kSide, {.seconds = 4, .link = Link::in_node, .link_seconds = 4});
  gather(kThird, {.seconds = 4, .link = Link::between_nodes, .link_seconds = 4},
         kReplicas);
  EXPECT_EQ(end_of(kSide), 4);
  EXPECT_EQ(end_of(kThird), 4);
}

TEST_F(SharingTest, ASlowedCollectiveMovesItsTrafficMoreSlowly) {
  // 0.6 of the bandwidth each alone, 0.3 each together: 0.4 is left.
  const CollectiveCost cost{
      .seconds = 50, .traffic = 30, .link = Link::in_node, .link_seconds = 50};
  gather(kSide, cost);
  gather(kThird, cost, kReplicas);
  move(kCompute, 2);
  EXPECT_DOUBLE_EQ(end_of(kCompute), 5);
}

// -- waiting for multiprocessors ----------------------------------------------

// A product of 5 waves of 2 s; a collective comes at 3.
class WaveTest : public DeviceTest {
 protected:
  void product_and_collective(int priority_of_product, int priority) {
    device.set_priority(kCompute, priority_of_product);
    device.set_priority(kSide, priority);
    compute(kCompute, 10, /*blocks=*/1000);
    device.spend(3);
    gather(kSide, {.seconds = 3, .channels = 20});
  }
  void expect_waits_until(double begin) {
    const auto found = spans(kSide);
    ASSERT_EQ(found.size(), 2U);
    EXPECT_EQ(found[0].kind, SpanKind::wait);
    EXPECT_EQ(found[0].begin, 3);
    EXPECT_DOUBLE_EQ(found[1].begin, begin);
    EXPECT_DOUBLE_EQ(found[1].end, begin + 3);
  }
};

TEST_F(WaveTest, AMoreUrgentCollectiveWaitsForTheWave) {
  product_and_collective(0, -1);
  expect_waits_until(4);
  // 6 s are left at 4; 2.4 of them are done at 7.
  expect_span(kCompute, 0, 10.6);
}

TEST_F(WaveTest, OneThatIsAsUrgentWaitsForTheLastWave) {
  product_and_collective(0, 0);
  expect_waits_until(8);
  expect_span(kCompute, 0, 10.5);  // 2 s are left, at a rate of 0.8
}

TEST_F(WaveTest, OneThatIsLessUrgentWaitsForTheLastWave) {
  product_and_collective(-1, 0);
  expect_waits_until(8);
}

TEST_F(WaveTest, InTheLastWaveItBegins) {
  compute(kCompute, 10, /*blocks=*/1000);
  device.spend(9);
  gather(kSide, {.seconds = 3, .channels = 20});
  expect_span(kSide, 9, 12);
}

TEST_F(WaveTest, InTheLastWaveAnUrgentOneBeginsToo) {
  compute(kCompute, 10, /*blocks=*/1000);
  device.set_priority(kSide, -1);
  device.spend(9);
  gather(kSide, {.seconds = 3, .channels = 20});
  expect_span(kSide, 9, 12);
}

TEST_F(WaveTest, APartOfAWaveIsAWave) {
  compute(kCompute, 10, /*blocks=*/801);  // 4 waves and a block
  device.spend(3);
  gather(kSide, {.seconds = 1, .channels = 20});
  EXPECT_EQ(spans(kSide).back().begin, 8);
}

TEST_F(WaveTest, BesideAKernelThatLeavesRoomItBeginsAtOnce) {
  compute(kCompute, 10, /*blocks=*/160);
  device.spend(3);
  gather(kSide, {.seconds = 3, .channels = 20});
  expect_span(kSide, 3, 6);
  EXPECT_EQ(end_of(kCompute), 10);
}

TEST_F(WaveTest, ItWaitsUntilEnoughKernelsYield) {
  // Half of the device each: waves end at 4, 8, ... and at 2, 4, ...
  for (const std::int64_t channels : {40, 60}) {
    Simulation two(round_machine());
    two.set_priority(kSide, -1);
    two.tell(two.kernel(kCompute, "long", 1000), {.flops = 10});
    two.tell(two.kernel(kThird, "short", 1000), {.flops = 5});
    two.spend(1);
    two.collective(kSide, kWorld, "all-gather",
                   {.seconds = 1, .channels = channels});
    two.finish();
    ASSERT_EQ(two.spans()[1].kind, SpanKind::collective);
    EXPECT_EQ(two.spans()[1].begin, channels == 40 ? 2 : 4);
  }
}

TEST_F(WaveTest, AGridThatNobodyCountedHasBlocksOfTheMachine) {
  Machine m = round_machine();
  m.accelerator.block_seconds = 3;  // 4 waves of 2.5 s
  Simulation counted(m);
  EXPECT_TRUE(
      counted.tell(counted.kernel(kCompute, "product", 0), {.flops = 10}));
  counted.spend(1);
  counted.collective(kSide, kWorld, "all-gather",
                     {.seconds = 1, .channels = 20});
  counted.finish();
  EXPECT_EQ(counted.spans().back().begin, 0);
  ASSERT_EQ(counted.spans().size(), 3U);
  EXPECT_EQ(counted.spans()[1].kind, SpanKind::collective);
  EXPECT_EQ(counted.spans()[1].begin, 7.5);
}

TEST_F(WaveTest, WavesAreLongerOnASlowDevice) {
  gather(kThird, {.seconds = 100, .channels = 50}, kReplicas);
  compute(kCompute, 10, /*blocks=*/1000);  // waves of 4 s
  device.set_priority(kSide, -1);
  device.spend(3);
  gather(kSide, {.seconds = 1, .channels = 20});
  EXPECT_EQ(spans(kSide).back().begin, 4);
}

TEST_F(WaveTest, AKernelThatComesLaterDoesNotDelayIt) {
  compute(kCompute, 10, /*blocks=*/1000);
  device.spend(3);
  gather(kSide, {.seconds = 3, .channels = 20});
  compute(kThird, 30, /*blocks=*/100);
  // Until it begins both have 2/3 of what they want: 5 s are left of the
  // product's 7 until its last wave, at 3 + 5 * 1.5.
  EXPECT_DOUBLE_EQ(spans(kSide).back().begin, 10.5);
}

TEST_F(WaveTest, TheMoreUrgentOfTwoBeginsFirst) {
  compute(kCompute, 10, /*blocks=*/1000);
  device.set_priority(kThird, -1);
  device.spend(3);
  gather(kSide, {.seconds = 3, .channels = 20});
  gather(kThird, {.seconds = 1, .channels = 20}, kReplicas);
  EXPECT_EQ(spans(kThird).back().begin, 4);
  EXPECT_GT(spans(kSide).back().begin, 8);
}

TEST_F(WaveTest, OfTwoThatMayBeginTheMoreUrgentIsFirst) {
  device.set_priority(kCompute, -2);
  device.set_priority(kThird, -1);
  compute(kCompute, 10, /*blocks=*/1000);
  device.spend(3);
  gather(kSide, {.seconds = 3, .channels = 60});
  gather(kThird, {.seconds = 1, .channels = 60}, kReplicas);
  EXPECT_EQ(spans(kThird).back().begin, 8);
  EXPECT_EQ(spans(kSide).back().begin, 9);
}

TEST_F(WaveTest, CollectivesWaitForEachOthersMultiprocessors) {
  gather(kSide, {.seconds = 3, .channels = 60});
  gather(kThird, {.seconds = 3, .channels = 60}, kReplicas);
  EXPECT_EQ(spans(kSide).back().begin, 0);
  EXPECT_EQ(spans(kThird).back().begin, 3);
}

TEST_F(WaveTest, ACollectiveOnTheWholeDeviceStopsProducts) {
  gather(kSide, {.seconds = 3, .channels = 1000});  // as many as there are
  compute(kCompute, 2);
  EXPECT_EQ(end_of(kCompute), 5);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::phantom
