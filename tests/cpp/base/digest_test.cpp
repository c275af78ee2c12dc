#include "base/digest.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace lowtide::base {
namespace LOWTIDE_FILE {

TEST(DigestTest, IsOfSizesDtypeAndBytes) {
  const at::Tensor x = at::arange(7, at::kFloat);
  EXPECT_EQ(digest(x), digest(x.clone()));
  EXPECT_EQ(digest(x.view({7, 1}).t().t()), digest(x.view({7, 1})));
  EXPECT_NE(digest(x), digest(x.view({7, 1})));
  EXPECT_NE(digest(x), digest(x.to(at::kInt)));
  for (std::int64_t i = 0; i < 7; ++i) {
    at::Tensor y = x.clone();
    y[i] = -y[i] - 1;
    EXPECT_NE(digest(x), digest(y)) << i;
  }
  EXPECT_NE(digest(at::zeros({1})), digest(-at::zeros({1})));  // bit for bit
  const at::Tensor nan = at::full({2}, NAN);
  EXPECT_EQ(digest(nan), digest(nan.clone()));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::base
