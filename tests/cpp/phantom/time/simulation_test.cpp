#include "phantom/time/simulation.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace lowtide::phantom {
namespace {

constexpr TimedStream kCompute = 0, kSide = 1, kThird = 2;
constexpr CommunicatorId kWorld = 0, kReplicas = 1;

// A byte and a FLOP take a second; 100 multiprocessors, two blocks on each.
Machine machine() {
  Machine m;
  m.accelerator.peak_flops = {1, 1, 1, 1, 1};
  m.accelerator.memory_bandwidth = 1;
  m.accelerator.multiprocessors = 100;
  m.accelerator.resident_blocks = 2;
  m.accelerator.host_bandwidth = 0.5;
  return m;
}

class SimulationTest : public ::testing::Test {
 protected:
  void compute(TimedStream stream, double seconds, std::int64_t blocks = 0) {
    EXPECT_TRUE(device.tell(device.kernel(stream, "product", blocks),
                            {.flops = seconds}));
  }
  void move(TimedStream stream, double seconds, std::int64_t blocks = 0) {
    EXPECT_TRUE(
        device.tell(device.kernel(stream, "copy", blocks), {.bytes = seconds}));
  }
  void gather(TimedStream stream, double seconds, std::int64_t channels = 0,
              CommunicatorId communicator = kWorld) {
    device.collective(stream, communicator, "all-gather",
                      {.seconds = seconds, .channels = channels});
  }
  double end_of(TimedStream stream) {
    return device.time_of(device.record(stream));
  }
  // The only span of that kind on a stream.
  Span span(SpanKind kind, TimedStream stream) {
    Span found;
    int number = 0;
    for (const Span& each : device.spans()) {
      if (each.kind != kind || each.stream != stream) continue;
      found = each;
      ++number;
    }
    EXPECT_EQ(number, 1);
    return found;
  }

  Simulation device{machine()};
};

TEST_F(SimulationTest, KernelsOfAStreamRunOneAfterAnother) {
  compute(kCompute, 2);
  compute(kCompute, 3);
  EXPECT_EQ(end_of(kCompute), 5);
  EXPECT_EQ(device.host(), 0);  // never waited
}

TEST_F(SimulationTest, AKernelBeginsNoEarlierThanItIsIssued) {
  device.spend(3);
  compute(kCompute, 1);
  device.spend(3);
  compute(kCompute, 1);
  device.finish();
  ASSERT_EQ(device.spans().size(), 2U);
  EXPECT_EQ(device.spans()[1].issued, 6);
  EXPECT_EQ(device.spans()[1].begin, 6);
  EXPECT_EQ(device.spans()[1].end, 7);
}

TEST_F(SimulationTest, SynchronizingStopsTheHost) {
  compute(kCompute, 2, /*blocks=*/100);
  compute(kSide, 7, /*blocks=*/100);
  device.synchronize_stream(kCompute);
  EXPECT_EQ(device.host(), 2);
  device.synchronize_all();
  EXPECT_EQ(device.host(), 7);
}

}  // namespace
}  // namespace lowtide::phantom
