#include "phantom/driver/gpus.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace lowtide::dry {
namespace LOWTIDE_FILE {

// NVIDIA's data sheets and the programming guide's table of capabilities.
struct Expected {
  std::string_view key;
  int major;
  int minor;
  int multiprocessors;
  int threads;
  int kibibytes_of_block;
  int mebibytes_of_l2;
  int gibibytes;  // whole ones, less what the driver takes
};

class GpusTest : public testing::TestWithParam<Expected> {};

TEST_P(GpusTest, AnswersWhatItIs) {
  const auto& expected = GetParam();
  const Gpu* gpu = gpu_named(expected.key);
  ASSERT_NE(gpu, nullptr);
  const auto answer = [&](CUdevice_attribute which) {
    return attribute(*gpu, which);
  };
  EXPECT_EQ(answer(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            expected.major);
  EXPECT_EQ(answer(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            expected.minor);
  EXPECT_EQ(answer(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            expected.multiprocessors);
  EXPECT_EQ(answer(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
            expected.threads);
  EXPECT_EQ(answer(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            expected.kibibytes_of_block << 10);
  EXPECT_EQ(answer(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
            expected.mebibytes_of_l2 << 20);
  EXPECT_EQ(gpu->memory() >> 30, static_cast<std::size_t>(expected.gibibytes));
  EXPECT_EQ(gpu->memory() % (std::size_t{2} << 20), 0U);
  // NVLink's switch came with Hopper.
  EXPECT_EQ(answer(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED),
            expected.major >= 9);
}

INSTANTIATE_TEST_SUITE_P(
    ByName, GpusTest,
    testing::Values(Expected{"a100-40", 8, 0, 108, 2048, 163, 40, 39},
                    Expected{"a100-80", 8, 0, 108, 2048, 163, 40, 79},
                    Expected{"h100", 9, 0, 132, 2048, 227, 50, 79},
                    Expected{"h200", 9, 0, 132, 2048, 227, 60, 139},
                    Expected{"b200", 10, 0, 148, 2048, 227, 126, 178},
                    Expected{"l40s", 8, 9, 142, 1536, 99, 96, 44},
                    Expected{"rtx4090", 8, 9, 128, 1536, 99, 72, 23}),
    [](const auto& tested) {
      std::string name(tested.param.key);
      for (char& letter : name) letter = letter == '-' ? '_' : letter;
      return name;
    });

TEST(GpuTest, NoOtherNames) {
  EXPECT_EQ(gpu_named("h300"), nullptr);
  EXPECT_EQ(gpu_names(), "a100-40, a100-80, h100, h200, b200, l40s, rtx4090");
}

TEST(GpuTest, WhatIsNotListedIsNotThere) {
  EXPECT_EQ(attribute(*gpu_named("h100"), CU_DEVICE_ATTRIBUTE_TCC_DRIVER), 0);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::dry
