#include "device/cpu_runtime.h"

#include <gtest/gtest.h>

namespace lowtide::device {
namespace LOWTIDE_FILE {

TEST(CpuRuntimeTest, EventsHaveAlwaysHappened) {
  CpuRuntime runtime;
  const Event event = runtime.record(Stream::compute);
  EXPECT_TRUE(event.empty());
  runtime.wait(Stream::gather, event);
  runtime.synchronize(Stream::gather);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::device
