#include "device/make_runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/check.h"

namespace lowtide::device {
namespace LOWTIDE_FILE {

using testing::StrEq;
using testing::ThrowsMessage;

TEST(MakeRuntimeTest, ACpuHasOne) {
  const c10::Device cpu(c10::DeviceType::CPU);
  EXPECT_EQ(make_runtime(cpu)->device(), cpu);
}

TEST(MakeRuntimeTest, AnyOtherDeviceIsRefusedByName) {
  for (const auto& device : {c10::Device(c10::DeviceType::XPU, 1),
                             c10::Device(c10::DeviceType::PrivateUse1, 0),
                             c10::Device(c10::DeviceType::Meta)}) {
    EXPECT_THAT([&] { make_runtime(device); },
                ThrowsMessage<InvalidArgument>(
                    StrEq("lowtide: device: expected cpu or cuda, got " +
                          device.str() + ". Move the model to one of these.")));
  }
}

#ifndef LOWTIDE_WITH_CUDA
TEST(MakeRuntimeTest, ABuildWithoutCudaSaysHowToGetIt) {
  EXPECT_THAT(
      [] { make_runtime(c10::Device(c10::DeviceType::CUDA, 0)); },
      ThrowsMessage<InvalidArgument>(
          StrEq("lowtide: device: expected cpu (this build has no CUDA), got "
                "cuda:0. Build lowtide with LOWTIDE_CUDA=ON, or move the model "
                "to the CPU.")));
}
#endif

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::device
