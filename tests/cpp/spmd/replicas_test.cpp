#include "spmd/replicas.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing/recording_collectives.h"
#include "testing/scripted_runtime.h"

namespace lowtide::spmd {
namespace LOWTIDE_FILE {

using testing::ElementsAre;

// Rank 0 of 3; rank 2 has another last value.
comm::RecordingCollectives axis() {
  return {0, 3, std::make_shared<device::ScriptedRuntime>(),
          [](const auto& request, const at::Tensor& mine) {
            at::Tensor theirs = mine.clone();
            const bool values = mine.numel() > 8;  // not the count
            if (values && request.rank == 2) theirs[-1] += 1;
            return theirs;
          }};
}

TEST(ReplicasTest, TheFirstDifferenceIsFound) {
  auto ranks = axis();
  EXPECT_FALSE(first_difference(ranks, c10::kCPU, {}));
  EXPECT_FALSE(first_difference(ranks, c10::kCPU, {5}));
  const auto found = first_difference(ranks, c10::kCPU, {5, 6, 7});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->index, 2);
  EXPECT_THAT(found->by_rank, ElementsAre(7, 7, 7 + (std::int64_t{1} << 56)));
}

TEST(ReplicasTest, DifferentNumbersOfValuesAreADifference) {
  comm::RecordingCollectives ranks(
      0, 2, std::make_shared<device::ScriptedRuntime>(),
      [](const auto&, const at::Tensor& mine) { return mine + 1; });
  const auto found = first_difference(ranks, c10::kCPU, {5, 6});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->index, -1);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::spmd
