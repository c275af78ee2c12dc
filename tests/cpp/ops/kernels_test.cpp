// The CUDA kernels and what decides their grids, whole, on host threads: groups
// that run at once, warps, barriers, atomics.  transfer_test has every shape of
// a tile; results on a GPU are the other tests', where there is one.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
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

using on_host::Launch;

// What a device holds at once: one group, fewer than the tiles of a launch, so
// that the last turn of the groups is a part, and more.
constexpr std::int64_t kResident[] = {1, 4, 1000};

class KernelsTest : public testing::Test {
 protected:
  KernelsTest() {
    at::manual_seed(0);
    on_host::resident = 4;
    on_host::adds_four = true;
    on_host::launches.clear();
  }
};

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

std::vector<double> square_sums(at::ScalarType dtype,
                                const std::vector<Transfer>& transfers) {
  constexpr double kBeyond = 17;
  const auto groups = static_cast<std::size_t>(grids::groups(transfers));
  std::vector<double> sums(groups, std::numeric_limits<double>::quiet_NaN());
  sums.push_back(kBeyond);
  grids::square_sums(dtype, transfers, sums.data());
  EXPECT_EQ(sums.back(), kBeyond);
  sums.pop_back();
  return sums;
}

float norm_of(const std::vector<double>& sums) {
  float norm = -1;
  grids::norm(sums.data(), static_cast<std::int64_t>(sums.size()), &norm);
  return norm;
}

// Of one pass over these.
std::vector<Launch> expected_launches(const std::vector<Transfer>& transfers) {
  std::vector<Launch> launches;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    if (i % kMostTransfers == 0) launches.push_back({0, kTileThreads});
    launches.back().groups = std::min(
        launches.back().groups + num_tiles(transfers[i]), on_host::resident);
  }
  return launches;
}

void expect_norm(const std::vector<at::Tensor>& tensors) {
  const auto all = transfers(tensors, tensors);
  on_host::launches.clear();
  const auto sums = square_sums(tensors[0].scalar_type(), all);
  EXPECT_EQ(on_host::launches, expected_launches(all));
  EXPECT_EQ(norm_of(sums),
            static_cast<float>(std::sqrt(sum_of_squares(tensors))))
      << tensors[0].scalar_type() << ", " << on_host::resident << " groups";
}

TEST_F(KernelsTest, EveryElementIsInTheNormOnce) {
  for (const auto dtype : kKernelTypes) expect_norm(small_integers(dtype));
  for (const auto resident : kResident) {
    on_host::resident = resident;
    expect_norm({at::randint(-3, 4, {4 * kTileElements + 5}, at::kFloat),
                 at::randint(-3, 4, {77}, at::kFloat)});
  }
}

TEST_F(KernelsTest, TheNormOfAnyNumberOfSums) {
  for (const int count : {0, 1, 31, 256, 257, 1000}) {
    const std::vector<double> sums(static_cast<std::size_t>(count), 4.0);
    EXPECT_EQ(norm_of(sums), static_cast<float>(2 * std::sqrt(count)));
  }
}

TEST_F(KernelsTest, TheNormHasTheSameBitsWhateverThreadIsFirst) {
  const std::vector<at::Tensor> tensors{at::randn({3 * kTileElements + 5}),
                                        at::randn({77})};
  const auto all = transfers(tensors, tensors);
  const auto sums = square_sums(at::kFloat, all);
  for (int again = 0; again < 3; ++again) {
    EXPECT_EQ(square_sums(at::kFloat, all), sums);
    EXPECT_EQ(norm_of(sums), norm_of(sums));
  }
}

TEST_F(KernelsTest, ScalingMultipliesEachElementOnce) {
  const auto tensors = small_integers(at::kBFloat16);
  std::vector<at::Tensor> expected;
  for (const auto& each : tensors) expected.push_back(each * 0.3f);
  const float factor = 0.3f;
  const auto all = transfers(tensors, tensors);
  grids::scale(at::kBFloat16, all, &factor);
  EXPECT_EQ(on_host::launches, expected_launches(all));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ASSERT_TRUE(at::equal(bits(tensors[i]), bits(expected[i]))) << i;
  }
}

TEST_F(KernelsTest, AFactorOfOneWritesNothing) {
  const auto nan = at::full({100}, 0x7f800001, at::kInt);  // signalling
  const auto tensor = nan.view(at::kFloat).clone();
  const float one = 1;
  grids::scale(at::kFloat, transfers({tensor}, {tensor}), &one);
  EXPECT_TRUE(at::equal(bits(tensor), nan));
}

TEST_F(KernelsTest, BatchesOfTransfersReachTheirTensors) {
  const auto from = small_integers(at::kBFloat16);
  for (const auto resident : kResident) {
    on_host::resident = resident;
    on_host::launches.clear();
    std::vector<at::Tensor> to;
    for (const auto& each : from) {
      to.push_back(at::empty_like(each, at::kFloat).fill_(NAN));
    }
    const auto all = transfers(to, from);
    const auto expected = expected_launches(all);
    // A race of copies of the same values shows under ThreadSanitizer only.
    grids::transfers<Copy>(at::kFloat, at::kBFloat16, all);
    EXPECT_EQ(on_host::launches, expected);
    grids::transfers<Add>(at::kFloat, at::kBFloat16, all);
    EXPECT_EQ(on_host::launches.size(), 2 * expected.size());
    for (std::size_t i = 0; i < to.size(); ++i) {
      ASSERT_TRUE(at::equal(to[i], from[i].to(at::kFloat) * 2))
          << i << ", " << resident << " groups";
    }
  }
}

struct Rows {
  std::int64_t width;
  std::int64_t gap;     // between the rows of both
  std::int64_t offset;  // of the first row, in elements
};

// Additions of four values, where rows of both begin at a multiple of four.
std::int64_t fours_of(const Rows& rows, const at::Tensor& row,
                      std::int64_t num_to) {
  if (!on_host::adds_four) return 0;
  const auto aligned = [&](std::int64_t r) {
    return (rows.offset + r * (rows.width + rows.gap)) % 4 == 0;
  };
  std::int64_t fours = 0;
  for (std::int64_t i = 0; i < row.numel(); ++i) {
    const auto to = row[i].item<std::int64_t>();
    if (to < 0 || to >= num_to) continue;
    if (aligned(to) && aligned(i)) fours += rows.width / 4;
  }
  return fours;
}

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
  on_host::launches.clear();
  on_host::fours_added = 0;
  grids::rows(dtype, addition);
  EXPECT_EQ(on_host::launches,
            (std::vector<Launch>{
                {std::min(kFrom, on_host::resident), kTileThreads}}));

  const auto row = index.slice(0, 0, index.numel(), 2);
  EXPECT_EQ(on_host::fours_added, fours_of(rows, row, kTo));
  const auto valid = (row >= 0).logical_and(row < kTo).nonzero().squeeze(1);
  auto expected = at::zeros_like(canvas);
  expected.as_strided({kTo, rows.width}, {stride, 1}, rows.offset)
      .index_add_(0, row.index_select(0, valid),
                  from.to(at::kFloat).index_select(0, valid));
  EXPECT_TRUE(at::equal(canvas, expected))
      << dtype << " " << rows.width << " + " << rows.gap << " at "
      << rows.offset;
}

TEST_F(KernelsTest, RowsAreAddedWhereTheIndexSays) {
  for (const auto& rows :
       {Rows{1, 0, 0}, Rows{3, 1, 0}, Rows{4, 0, 0}, Rows{64, 0, 0},
        Rows{64, 4, 4}, Rows{64, 3, 0}, Rows{64, 0, 1}, Rows{1030, 2, 0}}) {
    for (const auto dtype : kKernelTypes) expect_rows_added(dtype, rows);
  }
  for (const auto resident : kResident) {
    on_host::resident = resident;
    expect_rows_added(at::kFloat, {64, 4, 4});
  }
}

TEST_F(KernelsTest, RowsAreAddedByDevicesThatAddOneValueAtATime) {
  on_host::adds_four = false;
  for (const auto dtype : kKernelTypes) expect_rows_added(dtype, {1030, 2, 0});
}

// As CUDA does: an empty grid is an error.
TEST_F(KernelsTest, AGridHasGroups) {
  EXPECT_THROW(grids::rows(at::kFloat, RowAddition{}), std::invalid_argument);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::ops::cuda
