#include "phantom/device/cublas_workspace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/check.h"

namespace lowtide::phantom {
namespace {

constexpr std::size_t kKiB = 1024;

TEST(CublasWorkspaceTest, TheConfigurationIsASumOfSizesTimesCounts) {
  EXPECT_EQ(cublas_workspace_bytes(":4096:8"), 32768 * kKiB);
  EXPECT_EQ(cublas_workspace_bytes(":4096:2:16:8"), (8192 + 128) * kKiB);
  EXPECT_EQ(cublas_workspace_bytes(":16:8"), 128 * kKiB);
}

TEST(CublasWorkspaceTest, AnUnreadableConfigurationIsRefused) {
  EXPECT_THAT(
      [] { cublas_workspace_bytes("4 MiB"); },
      testing::ThrowsMessage<InvalidArgument>(testing::StrEq(
          "lowtide: CUBLAS_WORKSPACE_CONFIG: expected ':KiB:count', once or "
          "several times, got '4 MiB'. Set it to ':4096:8' for instance, or "
          "unset it.")));
}

}  // namespace
}  // namespace lowtide::phantom
