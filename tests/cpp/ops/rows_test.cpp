#include "ops/rows.h"

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

class RowsTest : public testing::TestWithParam<at::DeviceType> {
 protected:
  at::Tensor on_device(const at::Tensor& tensor) {
    return tensor.to(GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, RowsTest, on_devices(), device_name);

// Small whole numbers add up alike in any order.
at::Tensor whole(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::randint(-8, 9, sizes).to(dtype);
}

at::Tensor naive(const at::Tensor& self, const at::Tensor& index,
                 const at::Tensor& rows) {
  auto sum = self.clone();
  for (std::int64_t i = 0; i < index.size(0); ++i) {
    const auto row = index[i].item<std::int64_t>();
    if (row >= 0 && row < self.size(0)) {
      sum[row] += rows[i].to(sum.scalar_type());
    }
  }
  return sum;
}

TEST_P(RowsTest, AddsWhatALoopAdds) {
  for (const auto dtype : kKernelTypes) {
    for (const std::int64_t width : {1, 3, 4, 64, 1025}) {
      for (const std::int64_t count : {0, 1, 70}) {
        const auto self = whole({9, width});
        const auto index = at::randint(-2, 12, {count}, at::kLong);
        const auto rows = whole({count, width}, dtype);
        const auto sum = on_device(self.clone());
        add_rows(sum, on_device(index), on_device(rows));
        EXPECT_TRUE(at::equal(sum.cpu(), naive(self, index, rows)))
            << dtype << ", " << count << " rows of " << width;
      }
    }
  }
}

TEST_P(RowsTest, TakesStridedOperands) {
  const auto self = whole({9, 21});
  const auto index = at::randint(0, 9, {60}, at::kLong);
  const auto rows = whole({60, 24}, at::kBFloat16);
  const auto canvas = on_device(self.clone());
  add_rows(canvas.slice(1, 4), on_device(index).slice(0, 0, 60, 2),
           on_device(rows).slice(0, 0, 30).slice(1, 3, 20));
  const auto expected = naive(self.slice(1, 4), index.slice(0, 0, 60, 2),
                              rows.slice(0, 0, 30).slice(1, 3, 20));
  EXPECT_TRUE(at::equal(canvas.slice(1, 4).cpu(), expected));
  EXPECT_TRUE(at::equal(canvas.slice(1, 0, 4).cpu(), self.slice(1, 0, 4)));
  const auto columns = on_device(whole({17, 60})).t();
  const auto sum = on_device(self.slice(1, 4).contiguous());
  const auto before = sum.cpu().clone();
  add_rows(sum, on_device(index), columns);
  EXPECT_TRUE(at::equal(sum.cpu(), naive(before, index, columns.cpu())));
}

TEST_P(RowsTest, SumsInTheDtypeOfTheRowsItAddsTo) {
  // bf16 would lose the ones.
  const auto self = on_device(at::zeros({1, 2}));
  const auto rows = at::ones({257, 2}, at::kBFloat16);
  add_rows(self, on_device(at::zeros({257}, at::kLong)), on_device(rows));
  EXPECT_TRUE(at::equal(self.cpu(), at::full({1, 2}, 257.0f)));
}

TEST_P(RowsTest, RowsPassedOverLeaveEveryBit) {
  const auto self = on_device(at::full({2, 4}, -0.0f));
  const auto rows = at::full({3, 4}, std::numeric_limits<float>::quiet_NaN());
  add_rows(self, on_device(at::tensor({-1, 2, 1 << 30}, at::kLong)),
           on_device(rows));
  EXPECT_TRUE(at::equal(bits(self), bits(at::full({2, 4}, -0.0f))));
  add_rows(on_device(at::zeros({0, 4})),
           on_device(at::tensor({0, 1, 2}, at::kLong)), on_device(rows));
}

TEST_P(RowsTest, DeterministicAlgorithmsAddTheSame) {
  const auto self = whole({9, 64});
  const auto index = at::randint(0, 9, {70}, at::kLong);
  const auto rows = whole({70, 64}, at::kBFloat16);
  const auto sum = on_device(self.clone());
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  add_rows(sum, on_device(index), on_device(rows));
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  EXPECT_TRUE(at::equal(sum.cpu(), naive(self, index, rows)));
}

TEST_P(RowsTest, OtherShapesAreRefused) {
  EXPECT_THAT(
      [&] {
        add_rows(on_device(at::zeros({3, 4})),
                 on_device(at::zeros({2}, at::kInt)),
                 on_device(at::zeros({2, 5})));
      },
      ThrowsMessage<InvalidArgument>(StrEq(
          "lowtide: torch.ops.lowtide.add_rows_: expected self [n, width], an "
          "int64 index [k] and rows [k, width], got [3, 4], Int [2] and [2, "
          "5]. Flatten all dimensions but the last.")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::ops
