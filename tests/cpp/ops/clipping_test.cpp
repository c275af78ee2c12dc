#include "ops/clipping.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"
#include "ops/devices.h"
#include "ops/transfer_of.h"

namespace lowtide::ops {
namespace LOWTIDE_FILE {

using testing::StrEq;
using testing::ThrowsMessage;

class ClippingTest : public testing::TestWithParam<at::DeviceType> {
 protected:
  at::Tensor values(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return at::randn(sizes).to(GetParam(), dtype);
  }
  std::vector<at::Tensor> gradients() {
    std::vector<at::Tensor> all;
    for (const auto dtype : kKernelTypes) {
      for (const std::int64_t n : {0, 1, 5, 511, 4099}) {
        all.push_back(values({n}, dtype));
        all.push_back(values({6, n + 3}, dtype).slice(1, 3));
      }
    }
    for (std::int64_t n = 0; n < 60; ++n) all.push_back(values({n + 1}));
    all.push_back(values({5, 7}).t());
    all.push_back(
        values({40, 9, 8, 7}).slice(3, 0, 5).slice(2, 1, 4).slice(1, 2, 5));
    return all;
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, ClippingTest, on_devices(), device_name);

double exact_norm(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const auto& tensor : tensors) {
    sum += tensor.cpu().to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(sum);
}

TEST_P(ClippingTest, TheNormIsThatOfAllElements) {
  const auto all = gradients();
  const auto norm = foreach_l2_norm(all);
  EXPECT_EQ(norm.scalar_type(), at::kFloat);
  EXPECT_EQ(norm.dim(), 0);
  EXPECT_EQ(norm.device().type(), GetParam());
  const double exact = exact_norm(all);
  EXPECT_NEAR(norm.item<float>(), exact, 1e-6 * exact);
}

TEST_P(ClippingTest, TheNormIsTheSameInEveryRun) {
  const auto all = gradients();
  const auto first = foreach_l2_norm(all);
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(at::equal(foreach_l2_norm(all), first));
  }
}

TEST_P(ClippingTest, OneElementThatIsNotFiniteShows) {
  for (const float bad : {std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    auto all = gradients();
    all[7].select(0, all[7].size(0) - 1).fill_(bad);
    EXPECT_FALSE(std::isfinite(foreach_l2_norm(all).item<float>())) << bad;
  }
}

TEST_P(ClippingTest, ScalesEveryElementOnce) {
  const auto all = gradients();
  std::vector<at::Tensor> expected;
  for (const auto& tensor : all) {
    expected.push_back((tensor.to(at::kFloat) * 0.3f).to(tensor.scalar_type()));
  }
  foreach_scale(all, at::scalar_tensor(0.3f, all[0].options()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(at::equal(all[i], expected[i])) << i;
  }
}

TEST_P(ClippingTest, AFactorOfOneLeavesEveryBit) {
  const auto all = gradients();
  std::vector<at::Tensor> before;
  for (const auto& tensor : all) before.push_back(tensor.clone());
  foreach_scale(all, at::scalar_tensor(1.0f, all[0].options()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(at::equal(all[i], before[i])) << i;
  }
}

TEST(ClippingKernelTest, TilesAddUpToTheSumOfSquares) {
  for (const std::int64_t columns : {3, 700, 5000}) {
    const auto tensor = at::randn({7, columns + 1}).slice(1, 1);
    const auto transfer = *transfer_of(tensor, tensor);
    double total = 0;
    for (std::int64_t tile = 0; tile < num_tiles(transfer); ++tile) {
      for (int thread = 0; thread < kTileThreads; ++thread) {
        float sum = 0;
        run_tile<float, float>(transfer, tile, thread, SquareSum{&sum});
        total += sum;
      }
    }
    const double exact = std::pow(exact_norm({tensor}), 2);
    EXPECT_NEAR(total, exact, 1e-6 * exact) << columns;
  }
}

TEST_P(ClippingTest, NothingHasNoNorm) {
  EXPECT_THAT([] { foreach_l2_norm({}); },
              ThrowsMessage<InvalidArgument>(StrEq(
                  "lowtide: torch.ops.lowtide.foreach_l2_norm: expected one "
                  "tensor at least, got none. Without gradients there is "
                  "nothing to clip.")));
  EXPECT_NO_THROW(foreach_scale({}, at::scalar_tensor(0.5f)));
}

TEST_P(ClippingTest, OtherDtypesAreRefused) {
  EXPECT_THAT([&] { foreach_l2_norm({values({2}, at::kDouble)}); },
              ThrowsMessage<InvalidArgument>(StrEq(
                  "lowtide: torch.ops.lowtide.foreach_l2_norm: expected "
                  "tensors of float32, bfloat16 or float16, got Double. Use "
                  "torch.nn.utils.clip_grad_norm_ for other dtypes.")));
}

TEST_P(ClippingTest, TensorsOfOtherDevicesAreRefused) {
  const auto meta = at::empty({2}, at::kMeta);
  const auto here = values({2});
  EXPECT_THAT(
      [&] {
        foreach_scale({here, meta}, at::scalar_tensor(0.5f));
      },
      ThrowsMessage<InvalidArgument>(StrEq(base::concat(
          "lowtide: torch.ops.lowtide.foreach_scale_: expected tensors of one "
          "device, ",
          here.device(), ", got meta. Call it once for each device."))));
}

TEST_P(ClippingTest, AFactorIsOneNumber) {
  EXPECT_THAT(
      [&] { foreach_scale({values({2})}, values({2})); },
      ThrowsMessage<InvalidArgument>(
          StrEq("lowtide: torch.ops.lowtide.foreach_scale_: expected a factor "
                "without dimensions, got one of [2]. Pass one number.")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::ops
