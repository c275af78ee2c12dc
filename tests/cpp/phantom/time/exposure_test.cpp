#include "phantom/time/exposure.h"

#include <gtest/gtest.h>

namespace lowtide::phantom {
namespace LOWTIDE_FILE {

constexpr TimedStream kCompute = 0, kGather = 1, kReduce = 2;

Span span(SpanKind kind, TimedStream stream, double begin, double end) {
  Span made;
  made.kind = kind;
  made.stream = stream;
  made.begin = begin;
  made.end = end;
  return made;
}

Span kernel(TimedStream stream, double begin, double end) {
  return span(SpanKind::kernel, stream, begin, end);
}
Span collective(TimedStream stream, double begin, double end) {
  return span(SpanKind::collective, stream, begin, end);
}
Span wait(TimedStream stream, double begin, double end) {
  return span(SpanKind::wait, stream, begin, end);
}

TEST(UsageTest, CommunicationBesideComputeIsHidden) {
  const auto found = usage({kernel(kCompute, 0, 10), collective(kGather, 2, 8)},
                           kCompute, 0, 10);
  EXPECT_DOUBLE_EQ(found.seconds, 10);
  EXPECT_DOUBLE_EQ(found.compute, 10);
  EXPECT_DOUBLE_EQ(found.communication, 6);
  EXPECT_DOUBLE_EQ(found.exposed, 0);
  EXPECT_DOUBLE_EQ(found.idle, 0);
}

TEST(UsageTest, ExposedIsWhereComputeWaitsWhileACollectiveRuns) {
  // Waits 4..9; collectives 3..6 and 5..7 overlap: exposed 4..7.
  const auto found = usage(
      {kernel(kCompute, 0, 4), wait(kCompute, 4, 9), collective(kGather, 3, 6),
       collective(kReduce, 5, 7), kernel(kReduce, 7, 9)},
      kCompute, 0, 12);
  EXPECT_DOUBLE_EQ(found.communication, 4);
  EXPECT_DOUBLE_EQ(found.exposed, 3);
  EXPECT_DOUBLE_EQ(found.other_waits, 2);
  EXPECT_DOUBLE_EQ(found.other_kernels, 2);
  EXPECT_DOUBLE_EQ(found.idle, 3);  // 9..12: the host is late
}

TEST(UsageTest, IdleForTheHostIsNotExposed) {
  const auto found = usage({collective(kGather, 0, 5)}, kCompute, 0, 5);
  EXPECT_DOUBLE_EQ(found.exposed, 0);
  EXPECT_DOUBLE_EQ(found.idle, 5);
}

TEST(UsageTest, ACollectiveOnTheComputeStreamIsExposed) {
  const auto found = usage({kernel(kCompute, 0, 1), collective(kCompute, 1, 4)},
                           kCompute, 0, 4);
  EXPECT_DOUBLE_EQ(found.compute, 1);
  EXPECT_DOUBLE_EQ(found.exposed, 3);
}

TEST(UsageTest, WaitsOfOtherStreamsDoNotCount) {
  const auto found = usage(
      {wait(kGather, 0, 5), collective(kReduce, 0, 5), kernel(kCompute, 0, 5)},
      kCompute, 0, 5);
  EXPECT_DOUBLE_EQ(found.exposed, 0);
  EXPECT_DOUBLE_EQ(found.other_waits, 0);
}

TEST(UsageTest, OnlyWhatLiesWithinTheStretchCounts) {
  const auto found = usage({kernel(kCompute, 0, 4), wait(kCompute, 4, 10),
                            collective(kGather, 0, 10)},
                           kCompute, 3, 6);
  EXPECT_DOUBLE_EQ(found.seconds, 3);
  EXPECT_DOUBLE_EQ(found.compute, 1);
  EXPECT_DOUBLE_EQ(found.exposed, 2);
  EXPECT_DOUBLE_EQ(found.communication, 3);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::phantom
