#include "ops/weight_gradient.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "base/check.h"
#include "ops/devices.h"

namespace lowtide::ops {
namespace LOWTIDE_FILE {

using testing::StrEq;
using testing::ThrowsMessage;

class WeightGradientTest : public testing::TestWithParam<at::DeviceType> {
 protected:
  at::Tensor on_device(const at::Tensor& tensor) {
    return tensor.to(GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, WeightGradientTest, on_devices(),
                         device_name);

// Small whole numbers add up alike in any order.
at::Tensor whole(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randint(-3, 4, sizes).to(dtype);
}

struct Shape {
  std::int64_t tokens;
  std::int64_t out;
  std::int64_t in;
};

const std::vector<Shape> kShapes = {{0, 3, 4},    {1, 1, 1},    {7, 5, 3},
                                    {64, 16, 32}, {33, 128, 1}, {2, 0, 5}};

TEST_P(WeightGradientTest, WritesThenAddsTheProduct) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& [tokens, out, in] : kShapes) {
      const auto dy = whole({tokens, out}, dtype);
      const auto x = whole({tokens, in}, dtype);
      const auto product = at::mm(dy.to(at::kDouble).t(), x.to(at::kDouble));
      // What was there before is not read, NaN or not.
      const auto sum = on_device(at::full({out, in}, NAN));
      weight_gradient(sum, on_device(dy), on_device(x), false);
      EXPECT_TRUE(at::equal(sum.cpu().to(at::kDouble), product))
          << dtype << " " << tokens << " " << out << " " << in;
      weight_gradient(sum, on_device(dy), on_device(x), true);
      EXPECT_TRUE(at::equal(sum.cpu().to(at::kDouble), product * 2))
          << dtype << " " << tokens << " " << out << " " << in;
    }
  }
}

TEST_P(WeightGradientTest, WritesIntoASliceAndNowhereElse) {
  const auto flat = on_device(at::full({100}, 7.0F));
  const auto slice = flat.narrow(0, 16, 30).view({5, 6});
  const auto dy = whole({9, 5}, at::kBFloat16);
  const auto x = whole({9, 6}, at::kBFloat16);
  weight_gradient(slice, on_device(dy), on_device(x), false);
  EXPECT_TRUE(at::equal(slice.cpu().to(at::kDouble),
                        at::mm(dy.to(at::kDouble).t(), x.to(at::kDouble))));
  EXPECT_TRUE((flat.narrow(0, 0, 16) == 7).all().item<bool>());
  EXPECT_TRUE((flat.narrow(0, 46, 54) == 7).all().item<bool>());
}

TEST_P(WeightGradientTest, TakesStridedFactors) {
  const auto dy = whole({4, 12}, at::kFloat).narrow(1, 3, 5);
  const auto x = whole({6, 4}, at::kFloat).t();
  const auto sum = on_device(at::zeros({5, 6}));
  weight_gradient(sum, on_device(dy), on_device(x), true);
  EXPECT_TRUE(at::equal(sum.cpu(), at::mm(dy.t(), x)));
}

// bf16 gradients are rounded to 8 bits; these are not.
TEST_P(WeightGradientTest, KeepsWhatBf16WouldRound) {
  const auto dy = at::ones({3, 1}, at::kBFloat16);
  const auto x =
      at::tensor({256.0F, 1.0F, 0.5F}).view({3, 1}).to(at::kBFloat16);
  const auto sum = on_device(at::zeros({1, 1}));
  weight_gradient(sum, on_device(dy), on_device(x), false);
  EXPECT_EQ(sum.item<float>(), 257.5F);
}

TEST(WeightGradientOnCpu, PartsHaveTheBitsOfTheWhole) {
  const auto dy = at::randn({10, 6});
  const auto x = at::randn({10, 6});
  auto whole = at::mm(dy.t(), x);
  const auto flat = at::full({100}, 7.0F);
  std::vector<at::Tensor> parts;
  for (std::int64_t row = 0; row < 6; row += 2) {
    parts.push_back(flat.narrow(0, 16 * row, 12).view({2, 6}));
  }
  weight_gradient_in_parts(parts, dy, x, false);
  EXPECT_TRUE(at::equal(at::cat(parts), whole));
  weight_gradient_in_parts(parts, dy, x, true);
  EXPECT_TRUE(at::equal(at::cat(parts), whole.add_(whole.clone())));
  EXPECT_TRUE((flat.narrow(0, 12, 20) == 7).all().item<bool>());
}

TEST(WeightGradientOnCpu, HasTheBitsOfTorchsAccumulation) {
  at::manual_seed(0);
  const auto sum = at::empty({37, 53});
  at::Tensor torchs;
  for (int i = 0; i < 3; ++i) {
    const auto dy = at::randn({129, 37});
    const auto x = at::randn({129, 53});
    weight_gradient(sum, dy, x, i > 0);
    torchs = i == 0 ? at::mm(dy.t(), x) : torchs + at::mm(dy.t(), x);
  }
  EXPECT_TRUE(at::equal(sum, torchs));
}

TEST(WeightGradientOnCpu, RefusesWhatDoesNotFit) {
  EXPECT_THAT(
      [] {
        weight_gradient(at::zeros({2, 3}), at::zeros({4, 2}), at::zeros({5, 3}),
                        false);
      },
      ThrowsMessage<InvalidArgument>(
          StrEq("lowtide: torch.ops.lowtide.weight_gradient_: expected self "
                "[out, in], grad_output [tokens, out] and activation [tokens, "
                "in], "
                "got [2, 3], [4, 2] and [5, 3]. Flatten all dimensions but the "
                "last.")));
  EXPECT_THAT(
      [] {
        weight_gradient(at::zeros({2, 3}, at::kBFloat16), at::zeros({4, 2}),
                        at::zeros({4, 3}), false);
      },
      ThrowsMessage<InvalidArgument>(
          StrEq("lowtide: torch.ops.lowtide.weight_gradient_: expected one "
                "dtype, or an fp32 self of bf16 or fp16 factors, got BFloat16 "
                "of Float and Float. Cast the factors to one dtype.")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::ops
