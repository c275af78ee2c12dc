// What kernels, operators, events and graphs become on the timeline.
#include "phantom/driver/timekeeper.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "phantom/driver/capture.h"

namespace lowtide::dry {
namespace LOWTIDE_FILE {

using phantom::Machine;
using phantom::Span;
using phantom::SpanKind;
using phantom::Work;

cudaStream_t stream(std::uintptr_t number) {
  return reinterpret_cast<cudaStream_t>(number);
}

// A byte and an operation take a second each; the host takes no time.
Machine plain_machine() {
  Machine machine;
  machine.accelerator.peak_flops.fill(1);
  machine.accelerator.memory_bandwidth = 1;
  machine.accelerator.host_bandwidth = 1;
  machine.accelerator.multiprocessors = 1;
  return machine;
}

class TimekeeperTest : public ::testing::Test {
 protected:
  TimekeeperTest() { keeper.start(plain_machine()); }

  std::vector<Span> work() {
    std::vector<Span> found;
    for (const Span& span : keeper.stop()->spans()) {
      if (span.kind != SpanKind::wait) found.push_back(span);
    }
    return found;
  }

  Timekeeper keeper;
};

TEST_F(TimekeeperTest, KernelTakesTheWorkOfItsOperator) {
  keeper.enter("aten::add");
  keeper.kernel(nullptr, "vectorized_kernel", 1000);
  keeper.leave({.bytes = 3});
  const auto found = work();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].name, "aten::add");
  EXPECT_DOUBLE_EQ(found[0].end - found[0].begin, 3);
}

TEST_F(TimekeeperTest, KernelOfNoOperatorHasItsOwnName) {
  keeper.kernel(nullptr, "pack_gradients", 1000);
  const auto found = work();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].name, "pack_gradients");
}

TEST_F(TimekeeperTest, OperatorsWorkIsThatOfItsOwnKernels) {
  keeper.enter("aten::outer");
  keeper.kernel(nullptr, "a", 1000);
  keeper.enter("aten::inner");
  keeper.kernel(nullptr, "b", 1000);
  keeper.leave({.bytes = 5});
  keeper.leave({.bytes = 2});
  const auto found = work();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_DOUBLE_EQ(found[0].bytes, 2);
  EXPECT_EQ(found[1].name, "aten::inner");
  EXPECT_DOUBLE_EQ(found[1].bytes, 5);
}

TEST_F(TimekeeperTest, BytesAreSpreadByBlocksAndFlopsGoToLibraries) {
  keeper.enter("aten::addmm");
  keeper.kernel(nullptr, "copy of the bias", 3);
  keeper.product(nullptr, "cublasGemmEx");
  keeper.leave({.flops = 8, .bytes = 4});
  const auto found = work();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_DOUBLE_EQ(found[0].flops, 0);
  EXPECT_DOUBLE_EQ(found[0].bytes, 3);
  EXPECT_DOUBLE_EQ(found[1].flops, 8);
  EXPECT_DOUBLE_EQ(found[1].bytes, 1);
}

TEST_F(TimekeeperTest, StreamWaitsForAnEvent) {
  keeper.enter("aten::add");
  keeper.kernel(stream(1), "a", 1000);
  keeper.leave({.bytes = 3});
  const auto event = keeper.record(stream(1));
  keeper.wait(stream(2), event);
  keeper.move(stream(2), "copy", 2);
  const auto found = work();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_DOUBLE_EQ(found[1].begin, 3);
  EXPECT_DOUBLE_EQ(found[1].end, 5);
}

TEST_F(TimekeeperTest, SecondsBetweenEvents) {
  const auto from = keeper.record(stream(1));
  keeper.move(stream(1), "copy", 4);
  const auto to = keeper.record(stream(1));
  EXPECT_EQ(keeper.seconds_between(from, to), 4);
  EXPECT_EQ(keeper.seconds_between(Moment{}, to), std::nullopt);
}

TEST_F(TimekeeperTest, EventOfAnotherTimelineIsOver) {
  const auto before = keeper.record(stream(1));
  keeper.stop();
  ASSERT_TRUE(keeper.start(plain_machine()));
  keeper.wait(stream(2), before);
  keeper.move(stream(2), "copy", 2);
  const auto after = keeper.record(stream(2));
  EXPECT_EQ(keeper.seconds_between(before, after), std::nullopt);
  const auto found = work();
  EXPECT_DOUBLE_EQ(found.at(0).begin, 0);
}

TEST_F(TimekeeperTest, SecondTimelineIsRefusedWhileOneRuns) {
  EXPECT_FALSE(keeper.start(plain_machine()));
}

// What a captured stream does takes no time until its graph is launched, and
// takes it at every launch, on the stream that it is launched on.
TEST_F(TimekeeperTest, GraphTakesItsTimeWheneverItIsLaunched) {
  const auto graph = reinterpret_cast<cudaGraph_t>(std::uintptr_t{64});
  const auto exec = reinterpret_cast<cudaGraphExec_t>(std::uintptr_t{128});
  const auto origin = stream(4112), side = stream(4128), other = stream(4144);
  capture().begin(origin, cudaStreamCaptureModeRelaxed);
  keeper.begin_graph(origin);
  keeper.enter("aten::add");
  keeper.kernel(origin, "a", 1000);
  keeper.leave({.bytes = 3});
  const auto fork = keeper.record(origin);
  capture().wait(side, capture().record(origin));
  keeper.wait(side, fork);
  keeper.move(side, "copy", 2);
  capture().enqueue(side);
  const auto join = keeper.record(side);
  capture().wait(origin, capture().record(side));
  keeper.wait(origin, join);
  keeper.move(origin, "memset", 1);
  keeper.end_graph(graph);
  capture().end(origin);
  keeper.instantiate(exec, graph);
  keeper.play(exec, other);
  keeper.play(exec, other);
  const auto found = work();
  ASSERT_EQ(found.size(), 6U);
  EXPECT_EQ(found[0].name, "aten::add");
  EXPECT_EQ(found[0].stream, 4144);
  EXPECT_NE(found[1].stream, 4144);
  EXPECT_DOUBLE_EQ(found[1].begin, 3);
  EXPECT_DOUBLE_EQ(found[2].begin, 5);
  EXPECT_DOUBLE_EQ(found[3].begin, 6);
  EXPECT_DOUBLE_EQ(found[5].end, 12);
}

TEST_F(TimekeeperTest, HostSpendsWhatItsCallsCost) {
  keeper.stop();
  Machine machine = plain_machine();
  machine.host.launch = 10;
  machine.host.library_call = 100;
  ASSERT_TRUE(keeper.start(machine));
  keeper.kernel(nullptr, "a", 1000);
  keeper.product(nullptr, "gemm");
  const auto found = work();
  EXPECT_DOUBLE_EQ(found.at(0).issued, 10);
  EXPECT_DOUBLE_EQ(found.at(1).issued, 110);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::dry
