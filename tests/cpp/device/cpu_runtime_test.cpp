#include "device/cpu_runtime.h"

#include <gtest/gtest.h>

namespace lowtide::device {
namespace {

TEST(CpuRuntimeTest, EventsHaveAlwaysHappened) {
  CpuRuntime runtime;
  const Event event = runtime.record(Stream::compute);
  EXPECT_TRUE(event.empty());
  runtime.wait(Stream::gather, event);
  runtime.synchronize(Stream::gather);
}

}  // namespace
}  // namespace lowtide::device
