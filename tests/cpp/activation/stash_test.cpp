#include "activation/stash.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "harness.h"

namespace lowtide::activation {
namespace LOWTIDE_FILE {

using testing::IsEmpty;

TEST(StashTest, GoesThroughItsPlaces) {
  Device device;
  at::Tensor value = device.produce(3);
  Stash stash(device.memories, "residual", value);
  const device::Event ready = device.now();
  value.reset();
  EXPECT_EQ(stash.place(), Place::kept);
  EXPECT_EQ(device.device_bytes(), kBytes);

  stash.copy_out(ready);
  EXPECT_EQ(stash.place(), Place::leaving);
  EXPECT_EQ(device.host_bytes(), kBytes);

  stash.let_go();
  EXPECT_EQ(stash.place(), Place::host);
  EXPECT_EQ(device.device_bytes(), 0);

  stash.fetch();
  EXPECT_EQ(stash.place(), Place::back);
  EXPECT_EQ(device.device_bytes(), kBytes);
  EXPECT_EQ(device.consume(stash.on_device()), 3);

  stash.drop_fetched();
  EXPECT_EQ(stash.place(), Place::host);
  EXPECT_EQ(device.device_bytes(), 0);
  EXPECT_EQ(device.consume(stash.on_device()), 3);  // again, without prefetch
  EXPECT_THAT(device.scripted->violations(), IsEmpty());
}

TEST(StashTest, WhileTheDeviceHasTheBytesNothingIsCopiedBack) {
  Device device;
  at::Tensor value = device.produce(3);
  Stash stash(device.memories, "residual", value);
  stash.copy_out(device.now());
  EXPECT_EQ(stash.on_device().data(), value.data_ptr());
  stash.fetch();
  EXPECT_EQ(device.device_bytes(), kBytes);
}

TEST(StashTest, LettingGoWithoutACopyKeepsTheBytes) {
  Device device;
  const at::Tensor value = device.produce(3);
  Stash stash(device.memories, "residual", value);
  stash.let_go();
  EXPECT_EQ(stash.place(), Place::kept);
}

TEST(StashTest, HoldersKeepWhatWasCopiedBack) {
  Device device;
  at::Tensor value = device.produce(3);
  c10::Storage back;
  {
    Stash stash(device.memories, "residual", value);
    stash.copy_out(device.now());
    stash.let_go();
    value.reset();
    back = stash.on_device();
  }
  EXPECT_EQ(device.consume(back), 3);
  EXPECT_EQ(device.device_bytes(), kBytes);
  EXPECT_EQ(device.host_bytes(), 0);
}

// In each place, while its copy may still be under way.
TEST(StashTest, DyingAnywhereGivesEverythingBackInOrder) {
  for (int stages = 0; stages <= 3; ++stages) {
    Device device;
    {
      at::Tensor value = device.produce(3);
      Stash stash(device.memories, "residual", value);
      const device::Event ready = device.now();
      value.reset();
      if (stages > 0) stash.copy_out(ready);
      if (stages > 1) stash.let_go();
      if (stages > 2) stash.fetch();
    }
    EXPECT_EQ(device.device_bytes(), 0) << stages;
    EXPECT_EQ(device.host_bytes(), 0) << stages;
    EXPECT_THAT(device.scripted->violations(), IsEmpty()) << stages;
  }
}

TEST(StashTest, KnowsItsBytesAtTheirVersion) {
  Device device;
  at::Tensor value = device.produce(3);
  const Stash stash(device.memories, "residual", value);
  EXPECT_TRUE(stash.is_of(value));
  EXPECT_TRUE(stash.is_of(value.view({2, kNumel / 2}).t()));
  EXPECT_FALSE(stash.is_of(device.produce(3)));
  EXPECT_FALSE(stash.modified());
  value.add_(1);
  EXPECT_TRUE(stash.modified());
  EXPECT_FALSE(stash.is_of(value));
}

TEST(StashTest, AFailedAllocationLeavesTheBytesOnTheHost) {
  Device device;
  at::Tensor value = device.produce(3);
  Stash stash(device.memories, "residual", value);
  stash.copy_out(device.now());
  stash.let_go();
  device.memories.device->fail_next_lease(memory::Category::activations,
                                          "residual");
  EXPECT_THROW(stash.fetch(), c10::OutOfMemoryError);
  EXPECT_EQ(stash.place(), Place::host);
  EXPECT_EQ(device.consume(stash.on_device()), 3);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::activation
