// A device whose figures are round numbers.
#pragma once

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "phantom/time/simulation.h"

namespace lowtide::phantom {

inline constexpr TimedStream kCompute = 0, kSide = 1, kThird = 2;
inline constexpr CommunicatorId kWorld = 10, kReplicas = 11;

// A FLOP, a byte takes a second, a byte from the host two.  100
// multiprocessors, two blocks on each: a wave has 200.
inline Machine round_machine() {
  Machine m;
  m.accelerator.peak_flops = {1, 1, 1, 1, 1};
  m.accelerator.memory_bandwidth = 1;
  m.accelerator.multiprocessors = 100;
  m.accelerator.resident_blocks = 2;
  m.accelerator.host_bandwidth = 0.5;
  return m;
}

class DeviceTest : public ::testing::Test {
 protected:
  // `blocks`: 0 fills the device.
  void compute(TimedStream stream, double seconds, std::int64_t blocks = 0) {
    run(stream, {.flops = seconds}, blocks);
  }
  void move(TimedStream stream, double seconds, std::int64_t blocks = 0) {
    run(stream, {.bytes = seconds}, blocks);
  }
  void run(TimedStream stream, const Work& work, std::int64_t blocks) {
    EXPECT_TRUE(device.tell(device.kernel(stream, "kernel", blocks), work));
  }
  void gather(TimedStream stream, const CollectiveCost& cost,
              CommunicatorId communicator = kWorld) {
    device.collective(stream, communicator, "all-gather", cost);
  }
  double end_of(TimedStream stream) {
    return device.time_of(device.record(stream));
  }
  // Those of a stream, once everything is over.
  std::vector<Span> spans(TimedStream stream) {
    device.finish();
    std::vector<Span> found;
    for (const Span& span : device.spans()) {
      if (span.stream == stream) found.push_back(span);
    }
    return found;
  }
  // The only one of a stream.
  void expect_span(TimedStream stream, double begin, double end) {
    const auto found = spans(stream);
    ASSERT_EQ(found.size(), 1U);
    EXPECT_DOUBLE_EQ(found[0].begin, begin);
    EXPECT_DOUBLE_EQ(found[0].end, end);
  }

  Simulation device{round_machine()};
};

}  // namespace lowtide::phantom
