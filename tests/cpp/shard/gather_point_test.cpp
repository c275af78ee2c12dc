#include "shard/gather_point.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace lowtide::shard {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

// A block of Llama 8B: 218.1 M elements, 416 MiB in bf16.
constexpr std::int64_t kFfn = 4096 * 14336;
constexpr std::int64_t kSquare = 4096 * 4096;
constexpr std::int64_t kKeys = 4096 * 1024;
constexpr std::int64_t kBlock = 3 * kFfn + 2 * kSquare + 2 * kKeys;

TEST(ElementsThatCover, AreBytesOverTheLinkAtTheRateOfTheDevice) {
  // 364 MiB arrive; 3000 FLOPs a byte; 4 * 8192 FLOPs an element.
  EXPECT_EQ(elements_that_cover(416 * kMiB, 8, 8192),
            364 * kMiB * 3000 / (4 * 8192));
  EXPECT_EQ(elements_that_cover(2, 2, 1), 750);
}

TEST(ElementsThatCover, AreMoreBetweenNodes) {
  EXPECT_EQ(elements_that_cover(416 * kMiB, 64, 8192),
            416 * kMiB / 64 * 63 * 20000 / (4 * 8192));
}

TEST(ElementsThatCover, AreThoseOfACopyForOneRank) {
  EXPECT_EQ(elements_that_cover(416 * kMiB, 1, 8192),
            416 * kMiB * 300 / (4 * 8192));
}

TEST(ElementsThatCover, UnknownTokensCoverNothing) {
  EXPECT_EQ(elements_that_cover(2, 2, 0),
            std::numeric_limits<std::int64_t>::max());
}

const std::vector<std::int64_t> kGradients = {kFfn,  kFfn,  kFfn,   kSquare,
                                              kKeys, kKeys, kSquare};

TEST(GradientsBeforeGather, AreThoseThatLeaveEnoughToCover) {
  // Behind the three of the MLP 41.9 M are left, 34.9 M needed, 16.8 M come
  // next.
  EXPECT_EQ(gradients_before_gather(kGradients,
                                    elements_that_cover(416 * kMiB, 8, 8192)),
            3u);
}

TEST(GradientsBeforeGather, AreNoneWhereTheBackwardIsTooShort) {
  EXPECT_EQ(gradients_before_gather(kGradients,
                                    elements_that_cover(416 * kMiB, 8, 1024)),
            0u);
  EXPECT_EQ(gradients_before_gather(kGradients,
                                    elements_that_cover(416 * kMiB, 64, 8192)),
            0u);
  EXPECT_EQ(gradients_before_gather({kFfn}, 1), 0u);
}

TEST(GradientsBeforeGather, AreAllWhereNothingHasToBeCovered) {
  EXPECT_EQ(gradients_before_gather({kFfn, kSquare}, 0), 2u);
  EXPECT_EQ(gradients_before_gather({}, 0), 0u);
}

}  // namespace
}  // namespace lowtide::shard
