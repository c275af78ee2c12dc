#include "phantom/time/costs.h"

#include <gtest/gtest.h>

namespace lowtide::phantom {
namespace LOWTIDE_FILE {

Accelerator accelerator() {
  Accelerator a;
  a.peak_flops = {1e12, 2e12, 4e12, 8e12, 16e12};
  a.memory_bandwidth = 1e12;
  a.product_efficiency = 0.5;
  a.attention_efficiency = 0.25;
  a.memory_efficiency = 0.8;
  a.kernel_floor = 1e-6;
  return a;
}

TEST(KernelCostTest, IsTheLongerOfComputingAndMoving) {
  const Accelerator a = accelerator();
  // 8e9 / (8e12 / 2) = 2 ms; 1.6e9 / 0.8e12 = 2 ms.
  EXPECT_DOUBLE_EQ(kernel_seconds({8e9, 1.0, Rate::half}, a), 2e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({8e9, 3.2e9, Rate::half}, a), 4e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({0, 1.6e9}, a), 2e-3);
}

TEST(KernelCostTest, EveryRateHasItsPeakAndAttentionItsEfficiency) {
  const Accelerator a = accelerator();
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::fp64}, a), 2e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::fp32}, a), 1e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::tf32}, a), 0.5e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::eight_bit}, a), 0.125e-3);
  EXPECT_DOUBLE_EQ(kernel_seconds({1e9, 0, Rate::half, true}, a), 0.5e-3);
}

TEST(KernelCostTest, NoKernelIsShorterThanTheFloor) {
  EXPECT_DOUBLE_EQ(kernel_seconds({}, accelerator()), 1e-6);
  EXPECT_DOUBLE_EQ(kernel_seconds({0, 100}, accelerator()), 1e-6);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::phantom
