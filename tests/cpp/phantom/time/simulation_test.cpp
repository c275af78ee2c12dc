#include "phantom/time/simulation.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "phantom/time/device_fixture.h"

namespace lowtide::phantom {
namespace LOWTIDE_FILE {

class SimulationTest : public DeviceTest {};

TEST_F(SimulationTest, KernelsOfAStreamRunOneAfterAnother) {
  compute(kCompute, 2);
  compute(kCompute, 3);
  EXPECT_EQ(end_of(kCompute), 5);
  EXPECT_EQ(device.host(), 0);  // never waited
}

TEST_F(SimulationTest, NothingBeginsBeforeItIsIssued) {
  device.spend(3);
  compute(kCompute, 1);
  device.spend(3);
  compute(kCompute, 1);
  const auto found = spans(kCompute);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[1].issued, 6);
  EXPECT_EQ(found[1].begin, 6);
  EXPECT_EQ(found[1].end, 7);
}

TEST_F(SimulationTest, ASpanSaysWhatRan) {
  run(kSide, {.flops = 2, .bytes = 3}, /*blocks=*/0);
  device.transfer(kSide, "copy to device", 4, Direction::to_device);
  gather(kSide, {.seconds = 1, .bytes = 5});
  const auto found = spans(kSide);
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[0].kind, SpanKind::kernel);
  EXPECT_EQ(found[0].name, "kernel");
  EXPECT_EQ(found[0].flops, 2);
  EXPECT_EQ(found[0].bytes, 3);
  EXPECT_EQ(found[1].kind, SpanKind::transfer);
  EXPECT_EQ(found[1].name, "copy to device");
  EXPECT_EQ(found[1].bytes, 4);
  EXPECT_EQ(found[2].kind, SpanKind::collective);
  EXPECT_EQ(found[2].name, "all-gather");
  EXPECT_EQ(found[2].bytes, 5);
}

TEST_F(SimulationTest, SynchronizingStopsTheHost) {
  const EventNumber none = 0;
  compute(kCompute, 2, /*blocks=*/100);
  const EventNumber first = device.record(kCompute);
  compute(kCompute, 2, /*blocks=*/100);
  compute(kSide, 7, /*blocks=*/100);
  device.synchronize_event(none);
  EXPECT_EQ(device.host(), 0);
  device.synchronize_event(first);
  EXPECT_EQ(device.host(), 2);
  device.synchronize_stream(kCompute);
  EXPECT_EQ(device.host(), 4);
  device.synchronize_event(first);  // has happened
  EXPECT_EQ(device.host(), 4);
  device.synchronize_all();
  EXPECT_EQ(device.host(), 7);
  compute(kCompute, 1);
  EXPECT_EQ(end_of(kCompute), 8);
}

TEST_F(SimulationTest, AnEventJoinsStreams) {
  compute(kCompute, 2);
  device.wait(kSide, device.record(kCompute));
  compute(kSide, 1);
  const auto found = spans(kSide);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].kind, SpanKind::wait);
  EXPECT_EQ(found[0].begin, 0);
  EXPECT_EQ(found[0].end, 2);
  EXPECT_EQ(found[1].begin, 2);
  EXPECT_EQ(found[1].end, 3);
}

TEST_F(SimulationTest, AnEventIsOfItsRecordNotOfWhatComesAfter) {
  compute(kCompute, 2);
  const EventNumber early = device.record(kCompute);
  compute(kCompute, 10);
  EXPECT_NE(device.record(kCompute), early);
  device.wait(kSide, early);
  EXPECT_EQ(end_of(kSide), 2);
}

TEST_F(SimulationTest, AnEventIncludesWhatItsStreamWaitedFor) {
  compute(kCompute, 4);
  device.wait(kSide, device.record(kCompute));
  EXPECT_EQ(end_of(kSide), 4);
}

TEST_F(SimulationTest, WaitingForWhatHasHappenedTakesNoTime) {
  compute(kCompute, 2, /*blocks=*/100);
  compute(kSide, 5, /*blocks=*/100);
  device.wait(kSide, device.record(kCompute));
  device.wait(kSide, /*event=*/0);  // never recorded
  EXPECT_EQ(spans(kSide).size(), 1U);
}

TEST_F(SimulationTest, SeveralStreamsWaitForOneEvent) {
  compute(kCompute, 3);
  const EventNumber event = device.record(kCompute);
  for (const TimedStream stream : {kSide, kThird}) {
    device.wait(stream, event);
    compute(stream, 1, /*blocks=*/100);
  }
  EXPECT_EQ(spans(kSide).back().begin, 3);
  EXPECT_EQ(spans(kThird).back().begin, 3);
}

TEST_F(SimulationTest, AnEventThatNobodyRecordedIsRefused) {
  device.record(kCompute);
  try {
    device.time_of(2);
    FAIL() << "not refused";
  } catch (const std::out_of_range& error) {
    EXPECT_EQ(std::string(error.what()),
              "lowtide: Simulation: expected an event from 1 to 1, got 2. "
              "Record it first.");
  }
  EXPECT_THROW(device.wait(kSide, 2), std::out_of_range);
  EXPECT_THROW(device.synchronize_event(-1), std::out_of_range);
  EXPECT_THROW(device.time_of(0), std::out_of_range);
}

TEST_F(SimulationTest, WorkMayBeToldUntilTheKernelBegins) {
  const Ticket first = device.kernel(kCompute, "first", 0);
  const Ticket second = device.kernel(kCompute, "second", 0);
  EXPECT_TRUE(device.tell(first, {.flops = 1}));
  EXPECT_TRUE(device.tell(first, {.flops = 5}));  // the last one counts
  EXPECT_TRUE(device.tell(second, {.flops = 2}));
  const EventNumber end = device.record(kCompute);
  EXPECT_EQ(device.time_of(end), 7);
  EXPECT_FALSE(device.tell(first, {.flops = 1}));  // begun at 0
  EXPECT_TRUE(device.tell(second, {.flops = 3}));  // begins at 5
  EXPECT_EQ(device.time_of(end), 8);
}

TEST_F(SimulationTest, AKernelThatIsToldNothingTakesTheFloor) {
  Machine m = round_machine();
  m.accelerator.kernel_floor = 0.25;
  Simulation slow(m);
  slow.kernel(kCompute, "unknown", 1);
  EXPECT_EQ(slow.time_of(slow.record(kCompute)), 0.25);
}

TEST_F(SimulationTest, AskingForATimeStopsNobodyAndChangesNothing) {
  compute(kCompute, 4);
  const EventNumber end = device.record(kCompute);
  EXPECT_EQ(device.time_of(end), 4);
  EXPECT_EQ(device.host(), 0);
  EXPECT_TRUE(device.spans().empty());
  // So far.  What is issued now still shares the device from now on.
  device.spend(2);
  compute(kSide, 4);
  EXPECT_EQ(device.time_of(end), 6);
  device.synchronize_all();
  EXPECT_EQ(device.time_of(end), 6);
}

TEST_F(SimulationTest, WhatIsIssuedAfterAWaitIsIssuedLater) {
  compute(kCompute, 4);
  device.synchronize_stream(kCompute);
  compute(kSide, 4);
  EXPECT_EQ(end_of(kSide), 8);
  EXPECT_EQ(end_of(kCompute), 4);
}

TEST_F(SimulationTest, PhasesBeginWhenTheirStreamGetsThere) {
  device.mark("forward", kCompute);
  compute(kCompute, 2);
  device.mark("backward", kCompute);
  device.spend(5);
  device.mark("optimizer", kCompute);
  device.finish();
  const auto& marks = device.marks();
  ASSERT_EQ(marks.size(), 3U);
  EXPECT_EQ(marks[0].begin, 0);
  EXPECT_EQ(marks[1].phase, "backward");
  EXPECT_EQ(marks[1].begin, 2);
  EXPECT_EQ(marks[1].num_spans, 1U);
  EXPECT_EQ(marks[2].begin, 5);
}

TEST_F(SimulationTest, WorkThatNeverEndsIsRefused) {
  Machine m = round_machine();
  m.accelerator.memory_bandwidth = 0;
  Simulation endless(m);
  endless.tell(endless.kernel(kCompute, "copy", 0), {.bytes = 1});
  try {
    endless.finish();
    FAIL() << "not refused";
  } catch (const std::domain_error& error) {
    EXPECT_EQ(std::string(error.what()),
              "lowtide: Simulation: expected figures by which all work ends, "
              "got work that takes for ever. Give the machine's peaks and "
              "bandwidths.");
  }
}

// -- copy engines -------------------------------------------------------------

TEST_F(SimulationTest, EachDirectionHasACopyEngine) {
  device.transfer(kSide, "in", 1, Direction::to_device);
  device.transfer(kThird, "out", 1, Direction::to_host);
  compute(kCompute, 2);  // beside them
  EXPECT_EQ(end_of(kSide), 2);
  EXPECT_EQ(end_of(kThird), 2);
  EXPECT_EQ(end_of(kCompute), 2);
}

TEST_F(SimulationTest, CopiesOfOneDirectionTakeTurns) {
  device.transfer(kSide, "in", 1, Direction::to_device);
  device.transfer(kThird, "in", 1, Direction::to_device);
  const auto found = spans(kThird);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].kind, SpanKind::wait);
  EXPECT_EQ(found[0].end, 2);
  EXPECT_EQ(found[1].begin, 2);
  EXPECT_EQ(found[1].end, 4);
}

TEST_F(SimulationTest, ACopyThatIsReadyDoesNotWaitForOneThatIsNot) {
  compute(kSide, 10);
  device.transfer(kSide, "in", 1, Direction::to_device);
  device.transfer(kThird, "in", 1, Direction::to_device);
  EXPECT_EQ(end_of(kThird), 2);
  EXPECT_EQ(end_of(kSide), 12);
}

// -- communicators ------------------------------------------------------------

TEST_F(SimulationTest, CollectivesOfACommunicatorRunInTheOrderOfIssue) {
  compute(kCompute, 2);
  gather(kCompute, {.seconds = 3});
  gather(kSide, {.seconds = 1});  // could begin at 0
  const auto found = spans(kSide);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].kind, SpanKind::wait);
  EXPECT_EQ(found[0].begin, 0);
  EXPECT_EQ(found[1].begin, 5);
  EXPECT_EQ(found[1].end, 6);
}

TEST_F(SimulationTest, CommunicatorsDoNotWaitForEachOther) {
  compute(kCompute, 2);
  gather(kCompute, {.seconds = 3});
  gather(kSide, {.seconds = 1}, kReplicas);
  EXPECT_EQ(end_of(kSide), 1);
  EXPECT_EQ(end_of(kCompute), 5);
}

TEST_F(SimulationTest, ACollectiveOfOneRankTakesNoTime) {
  compute(kCompute, 2);
  gather(kCompute, {});
  gather(kCompute, {});
  EXPECT_EQ(end_of(kCompute), 2);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::phantom
