#include "shard/gradients/gradient_rows.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

constexpr float kUntouched = std::numeric_limits<float>::quiet_NaN();

struct Case {
  std::int64_t rows;
  std::int64_t inner;
  std::int64_t world_size;

  std::int64_t shard_numel() const {
    return (rows + world_size - 1) / world_size * inner;
  }
  GradientColumns columns(std::int64_t begin, std::int64_t end) const {
    return {world_size, shard_numel(), rows * inner, begin, end};
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::int64_t rows : {0, 1, 2, 3, 4, 5, 7, 10}) {
    for (const std::int64_t inner : {0, 1, 3}) {
      for (std::int64_t world_size = 1; world_size <= 5; ++world_size) {
        all.push_back({rows, inner, world_size});
      }
    }
  }
  return all;
}

// Calls `check(begin, end)` for cuts at, before and after every row.
template <typename Check>
void for_each_cut(const Case& c, Check check) {
  for (std::int64_t begin = 0; begin <= c.shard_numel(); ++begin) {
    for (std::int64_t end = begin; end <= c.shard_numel(); ++end) {
      check(begin, end);
    }
  }
}

enum class Write { copy, add };

// Element by element: rank r's column c is element r * shard_numel + c of the
// gradient, if there is one.
std::vector<float> naive(const Case& c, std::int64_t begin, std::int64_t end,
                         BlockPlace place, std::vector<float> matrix,
                         const std::vector<float>& gradient, Write write) {
  for (std::int64_t rank = 0; rank < c.world_size; ++rank) {
    for (std::int64_t column = begin; column < end; ++column) {
      const std::int64_t element = rank * c.shard_numel() + column;
      if (element >= c.rows * c.inner) continue;
      float& to =
          matrix[place.offset + rank * place.row_stride + column - begin];
      to = write == Write::add ? to + gradient[element] : gradient[element];
    }
  }
  return matrix;
}

std::string bits(const std::vector<float>& values) {
  std::string text;
  for (const float value : values) {
    text +=
        std::isnan(value) ? "nan " : base::concat(std::hexfloat, value, " ");
  }
  return text;
}

std::vector<float> values_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  const auto* begin = flat.const_data_ptr<float>();
  return {begin, begin + flat.numel()};
}

void transfer(Write write, const at::Tensor& gradient,
              const GradientColumns& columns, const at::Tensor& matrix,
              BlockPlace place) {
  ColumnTransfers transfers;
  transfers.push_back(gradient, columns, matrix, place);
  write == Write::add ? transfers.add() : transfers.copy();
}

void expect_naive(Write write, bool strided) {
  for (const Case& c : cases()) {
    const at::Tensor gradient = strided ? at::randn({c.inner, c.rows}).t()
                                        : at::randn({c.rows, c.inner});
    for_each_cut(c, [&](std::int64_t begin, std::int64_t end) {
      const BlockPlace place{3, c.shard_numel() + 2};
      const std::int64_t size = place.offset + c.world_size * place.row_stride;
      const at::Tensor matrix = write == Write::add
                                    ? at::randn({size})
                                    : at::full({size}, kUntouched);
      const auto expected = naive(c, begin, end, place, values_of(matrix),
                                  values_of(gradient), write);
      transfer(write, gradient, c.columns(begin, end), matrix, place);
      ASSERT_EQ(bits(values_of(matrix)), bits(expected))
          << c.rows << " x " << c.inner << " over " << c.world_size
          << " ranks, columns " << begin << " to " << end;
    });
  }
}

TEST(GradientRowsTest, CopiesWhatANaiveLoopCopies) {
  expect_naive(Write::copy, /*strided=*/false);
}

TEST(GradientRowsTest, AddsWhatANaiveLoopAdds) {
  expect_naive(Write::add, /*strided=*/false);
}

TEST(GradientRowsTest, TakesGradientsOfAnyStrides) {
  expect_naive(Write::copy, /*strided=*/true);
  expect_naive(Write::add, /*strided=*/true);
}

TEST(GradientRowsTest, CastsToTheMatrix) {
  const at::Tensor gradient =
      at::tensor({1.0f, 1.0f + 0x1p-7f, -0.0f}).to(at::kBFloat16);
  const at::Tensor matrix = at::full({3}, kUntouched);
  transfer(Write::copy, gradient, {1, 3, 3, 0, 3}, matrix, {0, 3});
  EXPECT_EQ(bits(values_of(matrix)), bits({1.0f, 1.0f + 0x1p-7f, -0.0f}));
  // The sum keeps what bf16 would round away.
  transfer(Write::add, at::full({3}, 256.0f).to(at::kBFloat16), {1, 3, 3, 0, 3},
           matrix, {0, 3});
  EXPECT_EQ(bits(values_of(matrix)), bits({257.0f, 257.0f + 0x1p-7f, 256.0f}));
}

TEST(GradientRowsTest, NegativeZeroSurvives) {
  const at::Tensor gradient = at::tensor({-0.0f, 0.0f});
  const at::Tensor matrix = at::full({2}, kUntouched);
  transfer(Write::copy, gradient, {2, 1, 2, 0, 1}, matrix, {0, 1});
  EXPECT_EQ(bits(values_of(matrix)), bits({-0.0f, 0.0f}));
  transfer(Write::add, gradient, {2, 1, 2, 0, 1}, matrix, {0, 1});
  EXPECT_EQ(bits(values_of(matrix)), bits({-0.0f, 0.0f}));
}

TEST(GradientRowsTest, NeutralColumnsChangeNoSum) {
  const GradientColumns columns{2, 0, 0, 1, 3};
  const at::Tensor matrix = at::full({8}, kUntouched);
  fill_columns(columns, matrix, {1, 4}, kNeutral);
  EXPECT_EQ(bits(values_of(matrix)),
            bits({kUntouched, -0.0f, -0.0f, kUntouched, kUntouched, -0.0f,
                  -0.0f, kUntouched}));
  for (const float x : {1.0f, 0.0f, -0.0f, -INFINITY}) {
    EXPECT_EQ(bits({x + values_of(matrix)[1]}), bits({x}));
  }
}

TEST(GradientRowsTest, NoColumnsAreNoWork) {
  const at::Tensor matrix = at::full({4}, kUntouched);
  fill_columns({2, 4, 8, 2, 2}, matrix, {0, 2}, kNeutral);
  transfer(Write::copy, at::ones({8}), {2, 4, 8, 2, 2}, matrix, {0, 2});
  EXPECT_EQ(bits(values_of(matrix)),
            bits({kUntouched, kUntouched, kUntouched, kUntouched}));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
