// How a full gradient maps to the rank-major matrix a reduce-scatter takes.
//
// A gradient of `numel` elements belongs to the ranks in runs of `shard_numel`
// (the last runs may be short or empty: padding).  Columns [begin, end) of all
// runs together are a block [world_size, end - begin].
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace lowtide::shard {

// Row r, column c of the block stands at
// matrix[offset + r * row_stride + c], `matrix` being flat.
struct BlockPlace {
  std::int64_t offset;
  std::int64_t row_stride;
};

struct GradientColumns {
  std::int64_t world_size;
  std::int64_t shard_numel;
  std::int64_t numel;  // without padding
  std::int64_t begin;
  std::int64_t end;
};

// Gradients that are copied (cast to the matrix's dtype) or added into matrices
// together.
class ColumnTransfers {
 public:
  // The columns of `gradient`, dense, any strides.  Padding is left untouched:
  // it is never read back from the result.
  void push_back(const at::Tensor& gradient, const GradientColumns& columns,
                 const at::Tensor& matrix, BlockPlace place);
  void copy() const;
  void add() const;

 private:
  c10::SmallVector<at::Tensor, 4> to_;
  c10::SmallVector<at::Tensor, 4> from_;
};

// [Note: Negative zero]
// A gradient that does not exist is sent as -0.0, the neutral element of IEEE
// addition (x + -0.0 == x for every x, -0.0 included; +0.0 would turn a sum of
// -0.0 into +0.0).
inline constexpr double kNeutral = -0.0;
void fill_columns(const GradientColumns& columns, const at::Tensor& matrix,
                  BlockPlace place, double value);

}  // namespace lowtide::shard
