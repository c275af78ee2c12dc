#include "device/cpu_runtime.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/check.h"

namespace lowtide::device {
namespace {

TEST(CpuRuntimeTest, BytesAreAlignedAndOnTheCpu) {
  CpuRuntime runtime;
  for (const std::size_t bytes : {1, 63, 4096, 100001}) {
    const c10::DataPtr data = runtime.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data.get()) % 64, 0u);
    EXPECT_EQ(data.device(), runtime.device());
  }
  EXPECT_EQ(runtime.device(), c10::Device(c10::DeviceType::CPU));
}

TEST(CpuRuntimeTest, EventsHaveAlwaysHappened) {
  CpuRuntime runtime;
  const Event event = runtime.record(Stream::compute);
  EXPECT_TRUE(event.empty());
  runtime.wait(Stream::gather, event);
  runtime.synchronize(Stream::gather);
}

TEST(CpuRuntimeTest, StreamScopesNest) {
  CpuRuntime runtime;
  EXPECT_EQ(runtime.current(), Stream::compute);
  {
    const StreamScope gather(runtime, Stream::gather);
    EXPECT_EQ(runtime.current(), Stream::gather);
    {
      const StreamScope reduce(runtime, Stream::reduce);
      EXPECT_EQ(runtime.current(), Stream::reduce);
    }
    EXPECT_EQ(runtime.current(), Stream::gather);
  }
  EXPECT_EQ(runtime.current(), Stream::compute);
}

TEST(CpuRuntimeTest, AnExceptionLeavesTheScope) {
  CpuRuntime runtime;
  try {
    const StreamScope gather(runtime, Stream::gather);
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(runtime.current(), Stream::compute);
}

TEST(CpuRuntimeTest, EveryThreadHasItsOwnCurrentStream) {
  CpuRuntime runtime;
  const StreamScope gather(runtime, Stream::gather);
  Stream elsewhere = Stream::gather;
  std::thread([&] { elsewhere = runtime.current(); }).join();
  EXPECT_EQ(elsewhere, Stream::compute);
}

TEST(CpuRuntimeTest, CopiesThroughPinnedBytesAndBack) {
  CpuRuntime runtime;
  const std::vector<float> values{1, 2, 3};
  const std::size_t bytes = values.size() * sizeof(float);
  const c10::DataPtr pinned = runtime.allocate_pinned(bytes);
  runtime.copy(Stream::offload, pinned.get(), values.data(), bytes,
               Copy::to_host);
  std::vector<float> back(3);
  runtime.copy(Stream::reload, back.data(), pinned.get(), bytes,
               Copy::to_device);
  EXPECT_EQ(back, values);
}

TEST(CpuRuntimeTest, TheWireIsNotForEntering) {
  CpuRuntime runtime;
  EXPECT_THROW(StreamScope(runtime, Stream::wire), Error);
}

}  // namespace
}  // namespace lowtide::device
