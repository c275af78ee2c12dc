// What every runtime promises: the CPU's, the scripted one, and CUDA's where
// there is a device, or the dry driver stands for one (cmake/CppTests.cmake).
#include "device/runtime.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "device/cpu_runtime.h"
#include "testing/scripted_runtime.h"
#ifdef LOWTIDE_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>

#include "device/cuda/cuda_runtime.h"
#endif

namespace lowtide::device {
namespace LOWTIDE_FILE {

std::vector<std::string> kinds() {
  std::vector<std::string> all{"cpu", "scripted"};
#ifdef LOWTIDE_WITH_CUDA
  if (c10::cuda::device_count() > 0) all.emplace_back("cuda");
#endif
  return all;
}

std::shared_ptr<Runtime> make(const std::string& kind) {
  if (kind == "scripted") return std::make_shared<ScriptedRuntime>();
#ifdef LOWTIDE_WITH_CUDA
  if (kind == "cuda") {
    return std::make_shared<CudaRuntime>(c10::Device(c10::DeviceType::CUDA));
  }
#endif
  return std::make_shared<CpuRuntime>();
}

class RuntimeTest : public testing::TestWithParam<std::string> {
 protected:
  void TearDown() override {
    EXPECT_EQ(runtime_->current(), Stream::compute);
    if (GetParam() == "scripted") {
      static_cast<ScriptedRuntime&>(*runtime_).expect_clean();
    }
  }

  const std::shared_ptr<Runtime> runtime_ = make(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Runtimes, RuntimeTest, testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param; });

constexpr Stream kEntered[] = {Stream::compute, Stream::gather, Stream::reduce,
                               Stream::offload, Stream::reload};

TEST_P(RuntimeTest, BytesAreAlignedAndOnTheDevice) {
  const bool on_cuda = runtime_->device().is_cuda();
  for (const std::size_t bytes : {1, 63, 4096, 100001}) {
    const c10::DataPtr data = runtime_->allocate(bytes);
    const auto address = reinterpret_cast<std::uintptr_t>(data.get());
    EXPECT_EQ(address % (on_cuda ? 256 : 64), 0u);
    EXPECT_EQ(data.device(), runtime_->device());
  }
}

TEST_P(RuntimeTest, ScopesNestAndEachStreamIsTheCurrentOneInsideItsOwn) {
  for (const Stream outer : kEntered) {
    const StreamScope scope(*runtime_, outer);
    for (const Stream inner : kEntered) {
      const StreamScope nested(*runtime_, inner);
      EXPECT_EQ(runtime_->current(), inner);
    }
    EXPECT_EQ(runtime_->current(), outer);
  }
}

TEST_P(RuntimeTest, AnExceptionLeavesTheScope) {
  try {
    const StreamScope gather(*runtime_, Stream::gather);
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(runtime_->current(), Stream::compute);
}

TEST_P(RuntimeTest, EveryThreadHasItsOwnCurrentStream) {
  const StreamScope gather(*runtime_, Stream::gather);
  Stream elsewhere = Stream::gather;
  std::thread([&] { elsewhere = runtime_->current(); }).join();
  EXPECT_EQ(elsewhere, Stream::compute);
}

TEST_P(RuntimeTest, TheWireIsNotForEntering) {
  EXPECT_THROW(StreamScope(*runtime_, Stream::wire), Error);
}

TEST_P(RuntimeTest, AnEmptyEventHasHappened) {
  for (const Stream stream : kEntered) runtime_->wait(stream, Event());
}

TEST_P(RuntimeTest, EventsAreWaitedForByAnyStreamAndMoreThanOnce) {
  for (const Stream recorded : kEntered) {
    const Event event = runtime_->record(recorded);
    for (const Stream waiting : kEntered) {
      runtime_->wait(waiting, event);
      runtime_->wait(waiting, event);
    }
  }
}

TEST_P(RuntimeTest, AnEventMayOutliveTheRuntime) {
  const Event event = make(GetParam())->record(Stream::gather);
  const Event copy = event;
}

TEST_P(RuntimeTest, TimeBetweenStampsIsNotNegative) {
  const Event from = runtime_->record_time(Stream::compute);
  const Event to = runtime_->record_time(Stream::compute);
  runtime_->synchronize(Stream::compute);
  if (from.empty()) return;  // no clock
  const auto elapsed = runtime_->elapsed_ns(from, to);
  ASSERT_TRUE(elapsed.has_value());
  EXPECT_GE(*elapsed, 0);
}

// Host to device on reload, device to host on offload, ordered by events only.
TEST_P(RuntimeTest, BytesTravelToTheDeviceAndBack) {
  constexpr std::size_t kBytes = (std::size_t{1} << 19) + 12;
  const c10::DataPtr sent = runtime_->allocate_pinned(kBytes);
  const c10::DataPtr received = runtime_->allocate_pinned(kBytes);
  ASSERT_NE(sent.get(), nullptr);
  ASSERT_NE(received.get(), nullptr);
  auto* const out = static_cast<std::uint8_t*>(sent.get());
  auto* const in = static_cast<std::uint8_t*>(received.get());
  for (std::size_t i = 0; i < kBytes; ++i) {
    out[i] = static_cast<std::uint8_t>(i * 7);
    in[i] = 0xEE;
  }
  {
    const c10::DataPtr bytes = runtime_->allocate(kBytes);
    runtime_->wait(Stream::reload, runtime_->record(Stream::compute));
    runtime_->copy(Stream::reload, bytes.get(), out, kBytes, Copy::to_device);
    runtime_->wait(Stream::offload, runtime_->record(Stream::reload));
    runtime_->copy(Stream::offload, in, bytes.get(), kBytes, Copy::to_host);
    runtime_->wait(Stream::compute, runtime_->record(Stream::offload));
  }
  runtime_->synchronize(Stream::offload);
  for (std::size_t i = 0; i < kBytes; ++i) ASSERT_EQ(in[i], out[i]) << i;
}

// Freed on the host at once, in use by another stream until compute has waited:
// the next owner's write must come behind the copy.
TEST_P(RuntimeTest, ReleasedBytesServeTheNextOwnerInTheOrderOfCompute) {
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  constexpr int kRounds = 8;
  std::vector<c10::DataPtr> hosts;
  for (int round = 0; round < 2 * kRounds; ++round) {
    hosts.push_back(runtime_->allocate_pinned(kBytes));
    auto* const begin = static_cast<std::uint8_t*>(hosts.back().get());
    std::fill_n(begin, kBytes, static_cast<std::uint8_t>(round));
  }
  for (int round = 0; round < kRounds; ++round) {
    const c10::DataPtr bytes = runtime_->allocate(kBytes);
    runtime_->wait(Stream::reload, runtime_->record(Stream::compute));
    runtime_->copy(Stream::reload, bytes.get(), hosts[round].get(), kBytes,
                   Copy::to_device);
    runtime_->wait(Stream::offload, runtime_->record(Stream::reload));
    runtime_->copy(Stream::offload, hosts[kRounds + round].get(), bytes.get(),
                   kBytes, Copy::to_host);
    runtime_->wait(Stream::compute, runtime_->record(Stream::offload));
  }
  runtime_->synchronize(Stream::offload);
  for (int round = 0; round < kRounds; ++round) {
    const auto* const copied =
        static_cast<const std::uint8_t*>(hosts[kRounds + round].get());
    EXPECT_EQ(copied[0], round);
    EXPECT_EQ(copied[kBytes - 1], round);
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::device
