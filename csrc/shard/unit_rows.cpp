// The part of Unit that RowStream uses.
#include <algorithm>

#include "base/check.h"
#include "shard/root.h"
#include "shard/row_stream.h"
#include "shard/unit.h"

namespace lowtide::shard {

RowStream& Unit::gradient_rows() {
  if (rows_) {
    return *rows_;
  }
  if (infos_.size() != 1 || infos_[0].sizes.size() < 2 ||
      infos_[0].shard_dim != 0) {
    throw InvalidArgument(base::error_text(
        base::concat("unit '", *name_, "'"),
        "one parameter with rows, to stream them",
        infos_.size() == 1 && infos_[0].shard_dim != 0
            ? base::concat("one that is split along dimension ",
                           infos_[0].shard_dim)
            : base::concat(infos_.size(), " parameters"),
        "Make the weight a unit of its own, without bias, or "
        "gather it whole."));
  }
  gradients_.stream_rows(0, buffers_.slice(0).inner);
  if (root_) {
    root_->replan(*this);
  } else {
    plan_gradients(GradientRing::bytes_for(GradientRing::kDefaultBudget,
                                           gradients_.wire_bytes()));
  }
  rows_ = std::make_unique<RowStream>(*this);
  return *rows_;
}

RowStream& Unit::stream_rows() {
  auto& rows = gradient_rows();
  streams_rows_ = true;
  return rows;
}

std::int64_t Unit::planned_gathered_bytes() const {
  if (!streams_rows_) {
    return buffers_.gathered_bytes();
  }
  std::int64_t numel = 0;
  for (std::int64_t k = 0;
       k < std::min<std::int64_t>(2, gradients_.num_blocks(0)); ++k) {
    numel += gradients_.block_columns(0, k).numel;
  }
  return numel *
         static_cast<std::int64_t>(c10::elementSize(infos_[0].compute_dtype));
}

std::int64_t Unit::planned_input_bytes() const {
  if (!streams_rows_ || buffers_.input_bytes() == 0) {
    return buffers_.input_bytes();
  }
  return planned_gathered_bytes() / groups_.gather->size();
}

void Unit::recorded_rows() { root_->recorded_rows(*this); }

void Unit::begin_rows_backward() {
  root_->open_backward();
  begin_backward();
}

void Unit::on_row_gradient(std::int64_t block, at::Tensor rows) {
  if (gradients_.parameter(0).lane < 0) {
    return;  // frozen
  }
  if (gradients_.sync()) {
    if (!root_->stream().contains(gradients_)) {
      root_->stream().append(gradients_);
    }
    root_->stream().accept_rows(gradients_, 0, block, std::move(rows));
    if (block + 1 == gradients_.num_blocks(0)) {
      finish_backward();
    }
  } else {
    gradients_.accumulate_rows(0, block, rows);
  }
}

}  // namespace lowtide::shard
