// Flat unreduced gradients of one unit and dtype, accumulated without
// communication: the first touch copies, later touches add in place, and the
// slab itself is the input of the reduce-scatter.  No zero-fill but of blocks
// with padding, no concatenation, no repacking.
//
// Every parameter owns a rank-major block [world_size, columns], columns being
// its shard_numel rounded up to a multiple of kChunkColumnMultiple.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/device_memory.h"
#include "shard/gradients/gradient_rows.h"
#include "shard/unit_name.h"

namespace lowtide::shard {

class GradientSlab {
 public:
  // shard_numel and numel per parameter; parameters not in `members` take no
  // space.
  GradientSlab(UnitName unit, at::ScalarType dtype, std::int64_t world_size,
               std::vector<std::int64_t> shard_numel,
               std::vector<std::int64_t> numel,
               const std::vector<std::int32_t>& members,
               std::shared_ptr<memory::DeviceMemory> memory);

  bool allocated() const { return static_cast<bool>(storage_); }
  // All of it, which must be allocated, as bytes.
  at::Tensor buffer() const;
  bool touched(std::int32_t i) const {
    return touched_[static_cast<std::size_t>(i)];
  }
  std::int64_t bytes() const { return bytes_; }

  // Of several parameters, each once, together, on the compute stream.
  using Gradient = std::pair<std::int32_t, at::Tensor>;
  void add(const std::vector<Gradient>& gradients);
  // The sum of parameter i is what adding in `dtype`, which is narrower, gives:
  // after each addition, on the compute stream.
  void round_sum(std::int32_t i, at::ScalarType dtype);
  // As `add`, for the columns of every rank's shard from `begin` on that
  // `rows`, laid out as `columns` says, stands for.  They come in order, all of
  // them.
  void add_rows(std::int32_t i, std::int64_t begin,
                const GradientColumns& columns, const at::Tensor& rows);

  // The same for the product grad_output^T input, [tokens, rows] and
  // [tokens, inner], which is the gradient of a parameter [rows, inner]: summed
  // in place, see ops/weight_gradient.h.
  void add_product(std::int32_t i, const at::Tensor& grad_output,
                   const at::Tensor& input);
  // Whether ranks' parts of parameter i follow each other without a gap.
  bool gapless(std::int32_t i) const {
    const auto k = static_cast<std::size_t>(i);
    return columns_[k] == shard_numel_[k] || world_size_ == 1;
  }
  // Parameter i's block, which is gapless, as [rows, inner].  Allocates.
  at::Tensor whole(std::int32_t i, std::int64_t inner);
  // What `whole` was asked for has been written by someone else.
  void touch(std::int32_t i) { touched_[static_cast<std::size_t>(i)] = true; }

  // Before the reduce-scatter: allocates if nothing was touched, fills
  // untouched blocks with `missing` and writes the flags.  On the compute
  // stream.
  void complete(const std::vector<std::int32_t>& members,
                double missing = kNeutral);
  // Inputs of one coalesced reduce-scatter: a block per member with columns,
  // then the flags.
  std::vector<at::Tensor> inputs(const std::vector<std::int32_t>& members);
  // What parameter i, which was touched, has: [numel], rank after rank, a copy
  // on the compute stream.  As a gradient of its own it is added as it was.
  at::Tensor read(std::int32_t i) const;
  // Columns of the corresponding outputs.
  std::int64_t columns(std::int32_t i) const {
    return columns_[static_cast<std::size_t>(i)];
  }
  std::int64_t flag_columns() const { return flag_columns_; }

  // Forgets what parameter i has.
  void drop(std::int32_t i);
  // Gives the bytes back but remembers what was touched.
  void release_bytes();
  // Ready for the next accumulation.
  void reset();

 private:
  void allocate();
  // What is copied where nothing has been, and what is added.
  struct Writes {
    ColumnTransfers first;
    ColumnTransfers later;
  };
  void write(std::int32_t i, const GradientColumns& columns, std::int64_t begin,
             const at::Tensor& gradient, Writes& writes);
  at::Tensor block(std::int32_t i) const;
  at::Tensor flags() const;

  UnitName unit_;
  at::ScalarType dtype_;
  std::int64_t world_size_;
  std::vector<std::int64_t> shard_numel_;
  std::vector<std::int64_t> numel_;
  std::vector<std::int64_t> columns_;
  std::vector<std::int64_t> offsets_;  // bytes
  std::int64_t flag_columns_;
  std::int64_t flags_offset_ = 0;
  std::int64_t bytes_ = 0;
  std::shared_ptr<memory::DeviceMemory> memory_;
  c10::Storage storage_;
  std::vector<bool> touched_;
};

}  // namespace lowtide::shard
