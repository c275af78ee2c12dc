#include "ops/foreach.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "base/check.h"
#include "ops/devices.h"

namespace lowtide::ops {
namespace LOWTIDE_FILE {

using testing::StrEq;
using testing::ThrowsMessage;

class ForeachTest : public testing::TestWithParam<at::DeviceType> {
 protected:
  at::Tensor values(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return at::randn(sizes).to(GetParam(), dtype);
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, ForeachTest, on_devices(), device_name);

struct Lists {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
};

template <typename Make>
Lists lists_of(Make make) {
  Lists lists;
  for (const auto to : kKernelTypes) {
    for (const auto from : kKernelTypes) {
      for (const std::int64_t n : {0, 1, 3, 8, 511, 4096, 10007}) {
        lists.to.push_back(make({n}, to));
        lists.from.push_back(make({n}, from));
        // Rows of a matrix that is not aligned, from every other row.
        lists.to.push_back(make({4, n + 3}, to).slice(1, 3));
        lists.from.push_back(
            make({8, n + 1}, from).slice(0, 0, 8, 2).slice(1, 1));
      }
    }
  }
  lists.to.push_back(make({6, 5, 4}, at::kFloat).permute({2, 0, 1}));
  lists.from.push_back(make({4, 6, 5}, at::kBFloat16));
  lists.to.push_back(make({7}, at::kDouble));
  lists.from.push_back(make({7}, at::kFloat));
  return lists;
}

TEST_P(ForeachTest, CopiesEveryPairBitForBit) {
  const auto lists = lists_of(
      [&](at::IntArrayRef sizes, auto dtype) { return values(sizes, dtype); });
  ASSERT_GT(lists.to.size(), 48);  // more than one launch of one kind
  std::vector<at::Tensor> expected;
  for (std::size_t i = 0; i < lists.to.size(); ++i) {
    expected.push_back(lists.from[i].to(lists.to[i].scalar_type()));
  }
  foreach_copy(lists.to, lists.from);
  for (std::size_t i = 0; i < lists.to.size(); ++i) {
    EXPECT_TRUE(at::equal(lists.to[i], expected[i])) << "pair " << i;
  }
}

TEST_P(ForeachTest, BelowAutogradCopiesOfRowsHaveTheSameBits) {
  Lists lists = lists_of(
      [&](at::IntArrayRef sizes, auto dtype) { return values(sizes, dtype); });
  const auto add = [&](const at::Tensor& to, const at::Tensor& from) {
    lists.to.push_back(to);
    lists.from.push_back(from);
  };
  add(values({2, 3, 9}).narrow(2, 1, 7), values({5, 3, 7}).narrow(0, 2, 2));
  add(values({3, 2, 7}).transpose(0, 1), values({2, 3, 7}));
  add(values({4, 6}).select(1, 3), values({4}));  // no rows
  add(values({4, 1}).expand({4, 1}), values({4, 3}).narrow(1, 2, 1));
  add(values({2, 2, 2, 2}), values({2, 2, 2, 2}));
  add(values({}), values({}));
  std::vector<at::Tensor> expected;
  for (std::size_t i = 0; i < lists.to.size(); ++i) {
    expected.push_back(lists.to[i].clone().copy_(lists.from[i]));
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    foreach_copy(lists.to, lists.from);
  }
  for (std::size_t i = 0; i < lists.to.size(); ++i) {
    EXPECT_TRUE(lists.to[i].equal(expected[i])) << i;
  }
}

// On CUDA the operator alone counts (operators.cpp).
TEST(ForeachCpuTest, AVersionCounterSeesACopyThatIsNotBelowAutograd) {
  const auto to = at::randn({4, 4});
  const auto before = to._version();
  foreach_copy({to}, {at::randn({4, 4})});
  EXPECT_EQ(to._version(), before + 1);
}

TEST_P(ForeachTest, AddsEveryPairBitForBit) {
  const auto lists = lists_of(
      [&](at::IntArrayRef sizes, auto dtype) { return values(sizes, dtype); });
  std::vector<at::Tensor> expected;
  for (std::size_t i = 0; i < lists.to.size(); ++i) {
    expected.push_back(lists.to[i].clone().add_(lists.from[i]));
  }
  foreach_add(lists.to, lists.from);
  for (std::size_t i = 0; i < lists.to.size(); ++i) {
    EXPECT_TRUE(at::equal(lists.to[i], expected[i])) << "pair " << i;
  }
}

TEST_P(ForeachTest, SixtySmallTensorsOfOneKind) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (std::int64_t i = 0; i < 60; ++i) {
    to.push_back(values({i}));
    from.push_back(values({i}, at::kBFloat16));
  }
  foreach_copy(to, from);
  for (std::size_t i = 0; i < 60; ++i) {
    EXPECT_TRUE(at::equal(to[i], from[i].to(at::kFloat))) << i;
  }
}

TEST_P(ForeachTest, WritesNothingElse) {
  const auto canvas = values({6, 1031});
  const auto before = canvas.clone();
  const auto to = canvas.slice(0, 1, 5).slice(1, 2, 1029);
  foreach_add({to}, {values({4, 1027}, at::kBFloat16)});
  EXPECT_FALSE(at::equal(canvas, before));
  to.copy_(before.slice(0, 1, 5).slice(1, 2, 1029));
  EXPECT_TRUE(at::equal(canvas, before));
}

TEST_P(ForeachTest, KeepsSpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto special =
      at::tensor({0.0f, -0.0f, inf, -inf, 1e-40f, 3.39e38f}).to(GetParam());
  const auto to = at::zeros({6}, special.options());
  foreach_copy({to}, {special});
  EXPECT_TRUE(at::equal(bits(to), bits(special)));
  const auto sixteen = at::zeros({6}, special.options().dtype(at::kBFloat16));
  foreach_copy({sixteen}, {special});
  EXPECT_TRUE(at::equal(bits(sixteen), bits(special.to(at::kBFloat16))));
  // -0.0 is what a missing gradient adds.
  foreach_add({to}, {at::full({6}, -0.0f, special.options())});
  EXPECT_TRUE(at::equal(bits(to), bits(special)));
  foreach_copy({to}, {at::full({6}, std::numeric_limits<float>::quiet_NaN(),
                               sixteen.options())});
  EXPECT_TRUE(at::isnan(to).all().item<bool>());
}

TEST_P(ForeachTest, CopiesOfTheSameTypeKeepTheBitsOfNaNs) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto nans = at::full({9}, 0x7fab, at::kShort).to(GetParam());
    const auto to = at::zeros({9}, nans.options().dtype(dtype));
    foreach_copy({to}, {nans.view(dtype)});
    EXPECT_TRUE(at::equal(bits(to), nans.cpu())) << dtype;
  }
}

TEST_P(ForeachTest, EmptyListsAreNoWork) {
  EXPECT_NO_THROW(foreach_copy({}, {}));
  EXPECT_NO_THROW(foreach_add({values({0})}, {values({0})}));
}

TEST_P(ForeachTest, ListsOfDifferentLengthsAreRefused) {
  EXPECT_THAT(
      [&] {
        foreach_copy({values({2}), values({2})}, {values({2})});
      },
      ThrowsMessage<InvalidArgument>(StrEq(
          "lowtide: torch.ops.lowtide.foreach_copy_: expected 2 sources, one "
          "for each destination, got 1. Pass lists of equal lengths.")));
}

TEST_P(ForeachTest, PairsOfDifferentSizesAreRefused) {
  EXPECT_THAT(
      [&] {
        foreach_add({values({2}), values({2, 3})}, {values({2}), values({3})});
      },
      ThrowsMessage<InvalidArgument>(
          StrEq("lowtide: torch.ops.lowtide.foreach_add_: pair 1: expected a "
                "source of [2, 3], got [3]. Expand the source first: nothing "
                "is broadcast.")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::ops
