// The CUDA kernels, whole, on host threads: groups, warps, barriers, atomics.
// transfer_test has every shape of a tile; results on a GPU are the other
// tests', where there is one.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "ops/cuda_on_host.h"
// Behind it:
#include "ops/cuda/clipping_kernels.cuh"
#include "ops/cuda/rows_kernel.cuh"
#include "ops/cuda/transfer_kernel.cuh"
#include "ops/devices.h"
#include "ops/transfer_of.h"

namespace lowtide::ops::cuda {
namespace LOWTIDE_FILE {

constexpr std::int64_t kMostGroups = 3;  // fewer than there are tiles

// More of them than a launch takes, some with several tiles.
std::vector<at::Tensor> small_integers(at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (std::int64_t i = 0; i < 2 * kMostTransfers + 3; ++i) {
    const auto n = i % 50 == 7 ? 2 * kTileElements + i : i + 1;
    all.push_back(at::randint(-3, 4, {n}, dtype));
  }
  return all;
}

std::vector<Transfer> transfers(const std::vector<at::Tensor>& to,
                                const std::vector<at::Tensor>& from) {
  auto all = transfers_of(to, from);
  EXPECT_EQ(all.lists.size(), 1);
  return all.lists.at(0).transfers;
}

// Sums of small integers are exact in any order.
double sum_of_squares(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const auto& each : tensors) {
    sum += each.to(at::kDouble).square().sum().item<double>();
  }
  return sum;
}

template <typename T>
std::vector<double> square_sums(const std::vector<Transfer>& transfers) {
  std::vector<double> sums;
  for_each_batch(
      transfers, kMostGroups, [&](const Batch& batch, unsigned groups) {
        std::vector<double> of_batch(groups,
                                     std::numeric_limits<double>::quiet_NaN());
        on_host::launch(groups, kTileThreads,
                        [&] { square_sums_kernel<T>(batch, of_batch.data()); });
        sums.insert(sums.end(), of_batch.begin(), of_batch.end());
      });
  return sums;
}

float norm_of(const std::vector<double>& sums) {
  float norm = -1;
  on_host::launch(1, kTileThreads, [&] {
    norm_kernel(sums.data(), static_cast<std::int64_t>(sums.size()), &norm);
  });
  return norm;
}

TEST(KernelsTest, EveryElementIsInTheNormOnce) {
  const auto check = [](auto type, at::ScalarType dtype) {
    const auto tensors = small_integers(dtype);
    const auto sums = square_sums<decltype(type)>(transfers(tensors, tensors));
    EXPECT_GT(sums.size(), kMostGroups) << dtype;  // several launches
    EXPECT_EQ(norm_of(sums),
              static_cast<float>(std::sqrt(sum_of_squares(tensors))));
  };
  check(float{}, at::kFloat);
  check(at::BFloat16{}, at::kBFloat16);
  check(at::Half{}, at::kHalf);
}

TEST(KernelsTest, TheNormOfAnyNumberOfSums) {
  for (const int count : {0, 1, 31, 256, 257, 1000}) {
    const std::vector<double> sums(static_cast<std::size_t>(count), 4.0);
    EXPECT_EQ(norm_of(sums), static_cast<float>(2 * std::sqrt(count)));
  }
}

TEST(KernelsTest, TheNormHasTheSameBitsWhateverThreadIsFirst) {
  const std::vector<at::Tensor> tensors{at::randn({3 * kTileElements + 5}),
                                        at::randn({77})};
  const auto all = transfers(tensors, tensors);
  const auto sums = square_sums<float>(all);
  for (int again = 0; again < 3; ++again) {
    EXPECT_EQ(square_sums<float>(all), sums);
    EXPECT_EQ(norm_of(sums), norm_of(sums));
  }
}

template <typename T>
void scale(const std::vector<Transfer>& transfers, float factor) {
  for_each_batch(transfers, kMostGroups,
                 [&](const Batch& batch, unsigned groups) {
                   on_host::launch(groups, kTileThreads,
                                   [&] { scale_kernel<T>(batch, &factor); });
                 });
}

TEST(KernelsTest, ScalingMultipliesEachElementOnce) {
  const auto tensors = small_integers(at::kBFloat16);
  std::vector<at::Tensor> expected;
  for (const auto& each : tensors) expected.push_back(each * 0.3f);
  scale<at::BFloat16>(transfers(tensors, tensors), 0.3f);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ASSERT_TRUE(at::equal(bits(tensors[i]), bits(expected[i]))) << i;
  }
}

TEST(KernelsTest, AFactorOfOneWritesNothing) {
  const auto nan = at::full({100}, 0x7f800001, at::kInt);  // signalling
  const auto tensor = nan.view(at::kFloat).clone();
  scale<float>(transfers({tensor}, {tensor}), 1.0f);
  EXPECT_TRUE(at::equal(bits(tensor), nan));
}

TEST(KernelsTest, BatchesOfTransfersReachTheirTensors) {
  const auto from = small_integers(at::kBFloat16);
  std::vector<at::Tensor> to;
  for (const auto& each : from) to.push_back(at::ones_like(each, at::kFloat));
  for_each_batch(transfers(to, from), kMostGroups,
                 [&](const Batch& batch, unsigned groups) {
                   on_host::launch(groups, kTileThreads, [&] {
                     transfer_kernel<float, at::BFloat16, Add>(batch);
                   });
                 });
  for (std::size_t i = 0; i < to.size(); ++i) {
    ASSERT_TRUE(at::equal(to[i], from[i].to(at::kFloat) + 1)) << i;
  }
}

struct Rows {
  std::int64_t width;
  std::int64_t gap;     // between the rows of both
  std::int64_t offset;  // of the first row, in elements
};

template <typename From>
void expect_rows_added(at::ScalarType dtype, const Rows& rows) {
  constexpr std::int64_t kTo = 5;
  constexpr std::int64_t kFrom = 9;
  const auto stride = rows.width + rows.gap;
  const auto canvas = at::zeros({rows.offset + kTo * stride});
  const auto to =
      canvas.as_strided({kTo, rows.width}, {stride, 1}, rows.offset);
  const auto from =
      at::randint(-3, 4, {rows.offset + kFrom * stride}, dtype)
          .as_strided({kFrom, rows.width}, {stride, 1}, rows.offset);
  // Equal ones, some that are no row, every second of a longer list.
  const auto index =
      at::tensor({2, 4, -1, 2, 0, 5, 2, 4, 3}, at::kLong).repeat_interleave(2);
  const RowAddition addition{to.mutable_data_ptr<float>(),
                             from.const_data_ptr(),
                             index.const_data_ptr<std::int64_t>(),
                             kTo,
                             kFrom,
                             rows.width,
                             stride,
                             stride,
                             2};
  on_host::launch(4, kTileThreads, [&] { add_rows_kernel<From>(addition); });

  const auto row = index.slice(0, 0, index.numel(), 2);
  const auto valid = (row >= 0).logical_and(row < kTo).nonzero().squeeze(1);
  auto expected = at::zeros_like(canvas);
  expected.as_strided({kTo, rows.width}, {stride, 1}, rows.offset)
      .index_add_(0, row.index_select(0, valid),
                  from.to(at::kFloat).index_select(0, valid));
  EXPECT_TRUE(at::equal(canvas, expected))
      << dtype << " " << rows.width << " + " << rows.gap << " at "
      << rows.offset;
}

TEST(KernelsTest, RowsAreAddedWhereTheIndexSays) {
  for (const auto& rows :
       {Rows{1, 0, 0}, Rows{3, 1, 0}, Rows{4, 0, 0}, Rows{64, 0, 0},
        Rows{64, 4, 4}, Rows{64, 3, 0}, Rows{64, 0, 1}, Rows{1030, 2, 0}}) {
    expect_rows_added<float>(at::kFloat, rows);
    expect_rows_added<at::BFloat16>(at::kBFloat16, rows);
    expect_rows_added<at::Half>(at::kHalf, rows);
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::ops::cuda
