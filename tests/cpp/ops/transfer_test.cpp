// The kernels' own code, run by a loop over tiles and threads.
#include "ops/transfer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "ops/devices.h"
#include "ops/transfer_of.h"

namespace lowtide::ops {
namespace LOWTIDE_FILE {

template <typename To, typename From, typename Operation>
void run(const Transfer& transfer, Operation operation) {
  for (std::int64_t tile = 0; tile < num_tiles(transfer); ++tile) {
    for (int thread = 0; thread < kTileThreads; ++thread) {
      run_tile<To, From>(transfer, tile, thread, operation);
    }
  }
}

template <typename With>
void with_type(at::ScalarType dtype, With with) {
  if (dtype == at::kFloat) return with(float{});
  if (dtype == at::kHalf) return with(at::Half{});
  with(at::BFloat16{});
}

struct Shape {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t gap;  // elements between a row and the next
};

// Around every boundary: vectors, tiles, rows that share a tile.
const Shape kShapes[] = {{1, 1, 0},    {3, 1, 4},    {5, 7, 2},
                         {2, 511, 1},  {2, 512, 3},  {3, 513, 0},
                         {4, 4095, 1}, {2, 4096, 8}, {3, 4097, 0},
                         {1, 9001, 0}, {3000, 3, 1}, {2, 12288, 64}};

at::Tensor rows_in(const at::Tensor& canvas, const Shape& shape,
                   std::int64_t offset, std::int64_t gap) {
  return canvas.as_strided({shape.rows, shape.columns},
                           {shape.columns + gap, 1}, offset);
}

template <typename Operation, typename Reference>
void expect_as_at(at::ScalarType to_dtype, at::ScalarType from_dtype,
                  Reference reference, Operation operation) {
  for (const auto& shape : kShapes) {
    for (const std::int64_t to_offset : {0, 1, 4, 7}) {
      for (const std::int64_t from_offset : {0, 1, 2, 8}) {
        const auto size = 16 + shape.rows * (shape.columns + shape.gap + 1);
        const auto source = at::randn({size}).to(from_dtype);
        const auto canvas = at::randn({size}).to(to_dtype);
        const auto expected = canvas.clone();
        const auto from = rows_in(source, shape, from_offset, 1);
        const auto to = rows_in(canvas, shape, to_offset, shape.gap);
        reference(rows_in(expected, shape, to_offset, shape.gap), from);
        with_type(to_dtype, [&](auto t) {
          with_type(from_dtype, [&](auto f) {
            run<decltype(t), decltype(f)>(*transfer_of(to, from), operation);
          });
        });
        ASSERT_TRUE(at::equal(bits(canvas), bits(expected)))
            << shape.rows << " x " << shape.columns << " + " << shape.gap
            << ", from " << from_dtype << " at " << from_offset << " to "
            << to_dtype << " at " << to_offset;
      }
    }
  }
}

TEST(TransferTest, CopiesAndCastsWhatAtCopyDoes) {
  for (const auto to : kKernelTypes) {
    for (const auto from : kKernelTypes) {
      expect_as_at(
          to, from, [](at::Tensor a, const at::Tensor& b) { a.copy_(b); },
          Copy{});
    }
  }
}

TEST(TransferTest, AddsWhatAtAddDoes) {
  for (const auto to : kKernelTypes) {
    for (const auto from : kKernelTypes) {
      expect_as_at(
          to, from, [](at::Tensor a, const at::Tensor& b) { a.add_(b); },
          Add{});
    }
  }
}

TEST(TransferTest, TakesMatricesOfRows) {
  // What a packed row of gathered parameters is: [outer, ranks, width].
  for (const std::int64_t width : {3, 700}) {
    const auto packed =
        at::randn({4, 2 * width + 5})
            .as_strided({2, 4, width}, {width, 2 * width + 5, 1});
    const auto to = at::zeros({2, 4, width});
    const auto transfer = transfer_of(to, packed);
    ASSERT_TRUE(transfer.has_value());
    run<float, float>(*transfer, Copy{});
    EXPECT_TRUE(at::equal(to, packed)) << width;
  }
}

TEST(TransferTest, CopiesOfTheSameTypeKeepTheBitsOfNaNs) {
  const auto nans = at::full({9}, 0x7fab, at::kShort);
  const auto to = at::zeros({9}, at::kBFloat16);
  run<at::BFloat16, at::BFloat16>(*transfer_of(to, nans.view(at::kBFloat16)),
                                  Copy{});
  EXPECT_TRUE(at::equal(bits(to), nans));
}

TEST(TransferTest, MergesWhatIsContiguousInBoth) {
  const auto transfer = transfer_of(at::zeros({5, 6, 7}), at::zeros({5, 6, 7}));
  EXPECT_EQ(transfer->columns, 210);
  EXPECT_EQ(transfer->rows, 1);
  EXPECT_EQ(num_tiles(*transfer), 1);
}

TEST(TransferTest, TakesTransposedSourcesElementByElement) {
  const auto from = at::randn({40, 50}).t();
  const auto to = at::zeros({50, 40});
  run<float, float>(*transfer_of(to, from), Copy{});
  EXPECT_TRUE(at::equal(to, from));
}

TEST(TransferTest, TakesOneElementForMany) {
  const auto to = at::zeros({9});
  run<float, float>(*transfer_of(to, at::full({}, 7.f).expand({9})), Copy{});
  EXPECT_TRUE(at::equal(to, at::full({9}, 7.f)));
}

TEST(TransferTest, LeavesWhatHasMoreDimensionsToAt) {
  const auto from = at::randn({4, 4, 4, 4}).slice(3, 0, 3).slice(1, 0, 3);
  const auto to = at::zeros({4, 3, 4, 3});
  EXPECT_TRUE(transfer_of(to, from).has_value());
  EXPECT_FALSE(
      transfer_of(
          to,
          at::randn({4, 4, 6, 4}).slice(3, 0, 3).slice(2, 0, 4).slice(1, 0, 3))
          .has_value());
}

TEST(TransferTest, ListsHoldPairsOfTheSameTypes) {
  const std::vector<at::Tensor> to{
      at::zeros({4}), at::zeros({2}, at::kBFloat16), at::zeros({0}),
      at::zeros({3}), at::zeros({5}, at::kDouble)};
  const std::vector<at::Tensor> from{at::ones({4}), at::ones({2}),
                                     at::ones({0}), at::ones({3}),
                                     at::ones({5})};
  const auto all = transfers_of(to, from);
  ASSERT_EQ(all.lists.size(), 2);
  EXPECT_EQ(all.lists[0].transfers.size(), 2);
  EXPECT_EQ(all.lists[1].to, at::kBFloat16);
  EXPECT_THAT(all.others, testing::ElementsAre(4));
}

TEST(TransferTest, DividesNumbersOfAnySize) {
  const std::int64_t large = (std::int64_t{1} << 40) + 123;
  EXPECT_EQ(divide(large, 7), large / 7);
  EXPECT_EQ(divide(100, large), 0);
  EXPECT_EQ(divide(0xffffffff, 2), 0x7fffffff);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::ops
