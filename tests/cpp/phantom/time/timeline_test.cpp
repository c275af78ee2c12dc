#include "phantom/time/timeline.h"

#include <gtest/gtest.h>

namespace lowtide::phantom {
namespace {

constexpr TimedStream kCompute = 0, kSide = 1;

// One byte takes a second; so does one byte in a collective of two ranks,
// whose ring passes half of the buffer.
Machine machine(double issue_cost = 0) {
  Machine m;
  m.accelerator.memory_bandwidth = 1;
  m.network.bandwidth_in_node = 0.5;
  m.network.rings = {{0, 0, 0, 0, 1, 1, {1e9, 1e9, 1e9}}};
  m.accelerator.host_bandwidth = 0.25;
  m.issue_cost = issue_cost;
  return m;
}

class TimelineTest : public ::testing::Test {
 protected:
  void kernel(TimedStream stream, double seconds) {
    line.issue();
    Work work;
    work.bytes = seconds;
    line.run(stream, "kernel", work);
  }
  Moment gather(TimedStream caller, double seconds, bool async = true,
                std::int64_t group = 0) {
    line.issue();
    return line.collective(group, {2, 1}, caller, async,
                           CollectiveKind::all_gather, seconds);
  }
  void expect_last(TimedStream stream, double begin, double end) {
    const Span& span = line.spans().back();
    EXPECT_EQ(span.stream, stream);
    EXPECT_DOUBLE_EQ(span.begin, begin);
    EXPECT_DOUBLE_EQ(span.end, end);
  }

  Timeline line{machine()};
};

TEST_F(TimelineTest, KernelsOfAStreamRunOneAfterAnother) {
  kernel(kCompute, 2);
  expect_last(kCompute, 0, 2);
  kernel(kCompute, 3);
  expect_last(kCompute, 2, 5);
  EXPECT_EQ(line.host(), 0);  // never waited
}

TEST_F(TimelineTest, StreamsRunBesideEachOther) {
  kernel(kCompute, 2);
  kernel(kSide, 3);
  expect_last(kSide, 0, 3);
}

TEST_F(TimelineTest, AnEventJoinsStreams) {
  kernel(kCompute, 2);
  const Moment event = line.record(kCompute);
  kernel(kCompute, 10);
  line.wait(kSide, event);
  expect_last(kSide, 0, 2);
  EXPECT_EQ(line.spans().back().kind, SpanKind::wait);
  kernel(kSide, 1);
  expect_last(kSide, 2, 3);
}

TEST_F(TimelineTest, WaitingForWhatHasHappenedTakesNoTime) {
  kernel(kCompute, 2);
  kernel(kSide, 5);
  line.wait(kSide, line.record(kCompute));
  EXPECT_EQ(line.spans().size(), 2U);
}

TEST_F(TimelineTest, AnEventIncludesWhatItsStreamWaitedFor) {
  kernel(kCompute, 4);
  line.wait(kSide, line.record(kCompute));
  EXPECT_DOUBLE_EQ(line.record(kSide), 4);
}

TEST(TimelineHostTest, IssuingCostsTheHostAndDelaysAnIdleDevice) {
  Timeline line(machine(/*issue_cost=*/3));
  Work work;
  work.bytes = 1;
  for (int i = 0; i < 2; ++i) {
    line.issue();
    line.run(kCompute, "kernel", work);
  }
  EXPECT_DOUBLE_EQ(line.host(), 6);
  EXPECT_DOUBLE_EQ(line.spans()[0].begin, 3);
  EXPECT_DOUBLE_EQ(line.spans()[1].begin, 6);
  EXPECT_DOUBLE_EQ(line.spans()[1].issued, 6);
}

TEST_F(TimelineTest, SynchronizingStopsTheHost) {
  kernel(kCompute, 2);
  kernel(kSide, 7);
  line.synchronize(kCompute);
  EXPECT_DOUBLE_EQ(line.host(), 2);
  line.synchronize_all();
  EXPECT_DOUBLE_EQ(line.host(), 7);
  kernel(kCompute, 1);
  expect_last(kCompute, 7, 8);
}

TEST_F(TimelineTest, AnAsynchronousCollectiveRunsOnItsGroupsStream) {
  kernel(kCompute, 2);
  const Moment done = gather(kCompute, 4);
  expect_last(stream_of_group(0), 2, 6);  // after what the caller had
  kernel(kCompute, 1);
  expect_last(kCompute, 2, 3);  // beside it
  line.wait(kCompute, done);
  kernel(kCompute, 1);
  expect_last(kCompute, 6, 7);
}

TEST_F(TimelineTest, ASynchronousCollectiveRunsOnTheCallersStream) {
  kernel(kSide, 2);
  gather(kSide, 4, /*async=*/false);
  expect_last(kSide, 2, 6);
  kernel(kSide, 1);
  expect_last(kSide, 6, 7);
}

TEST_F(TimelineTest, CollectivesOfAGroupRunInTheOrderOfIssue) {
  kernel(kCompute, 2);
  gather(kCompute, 3);
  gather(kSide, 1, /*async=*/false);  // could begin at 0
  expect_last(kSide, 5, 6);
  gather(kSide, 1, /*async=*/false, /*group=*/1);
  expect_last(kSide, 6, 7);
  gather(7, 1, /*async=*/true, /*group=*/2);  // another communicator
  expect_last(stream_of_group(2), 0, 1);
}

TEST_F(TimelineTest, CopiesFromTheHostTakeTheirOwnLink) {
  line.transfer(kSide, "copy to device", 2);
  expect_last(kSide, 0, 8);
  EXPECT_EQ(line.spans().back().kind, SpanKind::transfer);
}

TEST_F(TimelineTest, PhasesBeginWhenTheirStreamGetsThere) {
  line.mark("forward", kCompute);
  kernel(kCompute, 2);
  line.mark("backward", kCompute);
  ASSERT_EQ(line.marks().size(), 2U);
  EXPECT_EQ(line.marks()[1].phase, "backward");
  EXPECT_DOUBLE_EQ(line.marks()[1].begin, 2);
  EXPECT_EQ(line.marks()[1].num_spans, 1U);
}

}  // namespace
}  // namespace lowtide::phantom
