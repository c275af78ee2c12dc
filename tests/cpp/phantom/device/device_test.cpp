// The device installed in this process, in exact mode; what differs in meta
// mode is tested from Python, which can have a process of its own.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "phantom/device/install.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
const at::TensorOptions kBytes =
    at::TensorOptions(at::kByte).device(c10::DeviceType::PrivateUse1);

class DeviceTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    Options options;
    options.mode = Mode::exact;
    options.allocator.capacity = 256 * kMiB;
    if (!is_installed()) install(options);
  }
  void SetUp() override { memory().empty_cache(); }

  static CachingAllocator& memory() { return phantom_device().memory(); }
  static at::Tensor tensor(std::size_t mib) {
    return at::empty({static_cast<std::int64_t>(mib * kMiB)}, kBytes);
  }
};

TEST_F(DeviceTest, TensorsAreBlocksOfTheModel) {
  const std::size_t before = memory().allocated();
  {
    const auto one = tensor(12);
    EXPECT_EQ(memory().allocated() - before, 12 * kMiB);
    EXPECT_EQ(
        memory().block_size(reinterpret_cast<Address>(one.const_data_ptr())),
        12 * kMiB);
  }
  EXPECT_EQ(memory().allocated(), before);
  EXPECT_EQ(memory().reserved() - before, 12 * kMiB);
}

TEST_F(DeviceTest, TensorsHoldBytes) {
  const auto host = at::arange(6, at::kFloat).view({2, 3});
  const auto device = host.to(c10::DeviceType::PrivateUse1);
  EXPECT_TRUE(
      at::equal(device.t().matmul(device).cpu(), host.t().matmul(host)));
}

TEST_F(DeviceTest, AllocationsComeFromTheCurrentStreamsPool) {
  const auto guard_impl =
      c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
  const auto side = guard_impl->getNewStream(kPhantomDevice, 0);
  { const auto freed = tensor(32); }
  const std::size_t reserved = memory().reserved();
  {
    const c10::StreamGuard guard(side);
    const auto other = tensor(32);
    EXPECT_EQ(memory().reserved() - reserved, 32 * kMiB);
  }
  const auto again = tensor(32);
  EXPECT_EQ(memory().reserved() - reserved, 32 * kMiB);
}

TEST_F(DeviceTest, OutOfMemoryIsTorchsOwnError) {
  EXPECT_THAT([] { tensor(300); },
              testing::Throws<c10::OutOfMemoryError>(testing::Property(
                  &c10::OutOfMemoryError::what_without_backtrace,
                  testing::StartsWith("lowtide: "))));
}

TEST_F(DeviceTest, AnotherDeviceIndexIsRefused) {
  EXPECT_THAT(
      [] { at::empty({1}, kBytes.device(c10::Device(kPhantom, 3))); },
      testing::ThrowsMessage<InvalidArgument>(testing::StrEq(
          "lowtide: phantom: expected device phantom:0, the only one of a "
          "process, got index 3. A process simulates one rank; use "
          "torch.device('phantom').")));
}

TEST_F(DeviceTest, InstallingTwiceIsRefused) {
  EXPECT_THAT([] { install({}); },
              testing::ThrowsMessage<Error>(testing::StrEq(
                  "lowtide: phantom: expected one device per process, got a "
                  "second install. Choose its settings in the first call, or "
                  "start another process.")));
}

}  // namespace
}  // namespace lowtide::phantom
