// The part of Unit that RowStream uses.
#include <algorithm>

#include "base/check.h"
#include "shard/policy.h"
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
    plan_gradients(ring_bytes(kDefaultRingBudget, gradients_.wire_bytes()));
  }
  rows_ = std::make_unique<RowStream>(*this);
  return *rows_;
}

RowStream& Unit::stream_rows() {
  auto& rows = gradient_rows();
  streams_rows_ = true;
  return rows;
}

RowStream& Unit::look_up_rows(std::int64_t rows_at_once) {
  auto& rows = stream_rows();
  lookup_rows_ = std::min(rows_at_once, rows.padded_rows());
  rows.set_lookup_rows(lookup_rows_);
  return rows;
}

bool Unit::looks_up_rows() const {
  return lookup_rows_ > 0 && reshard_after_forward &&
         (state() == UnitState::sharded || state() == UnitState::reducing);
}

void Unit::prefetch_for_forward() {
  if (next_in_forward_ != nullptr) {
    prefetch_after(next_in_forward_);
  }
}

std::int64_t Unit::planned_gathered_bytes() const {
  if (!streams_rows_) {
    return buffers_.gathered_bytes();
  }
  if (lookup_rows_ > 0) {
    if (!reshard_after_forward) {
      return buffers_.gathered_bytes();
    }
    const auto& slice = buffers_.slice(0);
    return groups_.gather->size() *
           std::min(2 * lookup_rows_, slice.padded_rows) * slice.inner *
           static_cast<std::int64_t>(c10::elementSize(infos_[0].compute_dtype));
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

void Unit::begin_rows_forward(bool recorded) {
  root_->enter_rows(*this, recorded);
}

void Unit::begin_rows_backward() {
  root_->open_backward();
  begin_backward();
  if (!output_gradient_) {  // not called as a module
    next_in_backward_ = root_->enter_backward(*this);
  }
}

void Unit::on_row_gradient(std::int64_t block, at::Tensor rows) {
  if (!wants_gradient(0)) {
    return;
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
