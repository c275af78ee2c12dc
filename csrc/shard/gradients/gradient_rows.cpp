#include "shard/gradients/gradient_rows.h"

#include <algorithm>

#include "ops/foreach.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

at::Tensor block(const at::Tensor& flat, std::int64_t offset, std::int64_t rows,
                 std::int64_t columns, std::int64_t row_stride) {
  return strided_view(flat, {rows, columns}, {row_stride, 1},
                      flat.storage_offset() + offset);
}

}  // namespace

// The whole rows at once, then the one row that padding cuts short.
void ColumnTransfers::push_back(const at::Tensor& gradient,
                                const GradientColumns& c,
                                const at::Tensor& matrix, BlockPlace place) {
  const std::int64_t width = c.end - c.begin;
  if (c.numel == 0 || width == 0) {
    return;
  }
  const at::Tensor flat =
      gradient.is_contiguous() ? gradient : gradient.contiguous();
  // Rank r's run holds columns up to `end` iff r * shard_numel + end <= numel.
  const std::int64_t whole =
      c.numel < c.end
          ? 0
          : std::min(c.world_size, (c.numel - c.end) / c.shard_numel + 1);
  if (whole > 0) {
    to_.push_back(block(matrix, place.offset, whole, width, place.row_stride));
    from_.push_back(block(flat, c.begin, whole, width, c.shard_numel));
  }
  if (whole < c.world_size) {
    const std::int64_t left = c.numel - (whole * c.shard_numel + c.begin);
    if (left > 0) {
      to_.push_back(block(matrix, place.offset + whole * place.row_stride, 1,
                          left, place.row_stride));
      from_.push_back(
          block(flat, whole * c.shard_numel + c.begin, 1, left, c.shard_numel));
    }
  }
}

void ColumnTransfers::copy() const { ops::foreach_copy(to_, from_); }

void ColumnTransfers::add() const { ops::foreach_add(to_, from_); }

void fill_columns(const GradientColumns& columns, const at::Tensor& matrix,
                  BlockPlace place, double value) {
  if (columns.end > columns.begin) {
    block(matrix, place.offset, columns.world_size, columns.end - columns.begin,
          place.row_stride)
        .fill_(value);
  }
}

}  // namespace lowtide::shard
