// What a unit does around its modules' forward.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/graph_task.h"
#include "base/trace.h"
#include "shard/root.h"
#include "shard/unit.h"

namespace lowtide::shard {
namespace {

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), std::int64_t{0},
                         [](std::int64_t bytes, const at::Tensor& tensor) {
                           return bytes +
                                  static_cast<std::int64_t>(tensor.nbytes());
                         });
}

// Tokens, of [..., features].
std::int64_t rows_of(const at::Tensor& tensor) {
  const bool any = tensor.dim() > 0 && tensor.numel() > 0;
  return any ? tensor.numel() / tensor.size(-1) : 0;
}

}  // namespace

// [Note: Modules sharded together]
// The first module of a forward brings the parameters and the last one lets go
// of them.  A later module was entered after the first, so its nodes have
// higher sequence numbers: whatever of it this backward reaches has run when
// the inputs of the first recorded call are done, and watching those is enough.
// Outputs are watched of every module, for some may not run.
Unit::ForwardCall Unit::pre_forward(std::size_t module) {
  const base::TraceRange trace("lowtide::pre_forward", *name_);
  require_awake();
  const bool rows = rows_.looks_up();
  if (base::in_backward()) {
    // A recomputation; its backward follows.
    if (!rows) unshard();
    const bool began = group_.began_with(module);
    forward_call_ += began ? 1 : 0;
    return {began, true};
  }
  const bool begins = group_.begins_with(module, root_->forward_is_of(*this));
  Prefetch::Next next;
  if (begins) {
    ++forward_call_;
    const auto ahead = root_->enter_forward(*this);
    next.assign(ahead.begin(), ahead.end());
    calls_.begin_forward();
  } else {
    root_->require_stream(*this, "its forward");
  }
  group_.enter(module, begins);
  const bool watch =
      calls_.enter(at::GradMode::is_enabled(), root_->recording());
  const ForwardCall call{begins, watch};
  if (rows) {
    leaves().follow_shards();
    prefetch_.put_off(std::move(next));
    return call;
  }
  if (!begins) {
    unshard();  // the user may have resharded meanwhile
    return call;
  }
  gather();
  parameters_.set_ahead(false);
  // Issued before this unit's own kernels: the next gather then waits for
  // nothing but the unit before this one.
  Prefetch::gather(settings_->forward_prefetch, next);
  wait_for_gather();
  leaves().show_full();
  if (settings_->leaf_module) {
    leaves().count_references(buffers());
  }
  return call;
}

std::vector<at::Tensor> Unit::watch_forward_inputs(
    const std::vector<at::Tensor>& inputs) {
  auto watched = watch_inputs(inputs, weak_from_this());
  if (!base::in_backward()) {
    input_bytes_ = bytes_of(inputs);
    if (root_->forward_is_of(*this)) root_->note_inputs(inputs);
    calls_.watch(std::move(watched.node));
  }
  return std::move(watched.tensors);
}

bool Unit::post_forward(const std::vector<at::Tensor>& outputs,
                        std::size_t module) {
  const base::TraceRange trace("lowtide::post_forward", *name_);
  output_rows_ = 0;
  for (const auto& output : outputs) {
    watch_output(output, weak_from_this(), forward_call_);
    output_rows_ = std::max(output_rows_, rows_of(output));
  }
  if (base::in_backward()) {
    return group_.ended_with(module);
  }
  // Of the gradient of its output, which only its own backward needs.
  gradients_.set_room(
      std::max<std::int64_t>(0, bytes_of(outputs) - input_bytes_));
  const bool over = group_.leave(module, root_->forward_is_of(*this));
  if (over) end_forward();
  return over;
}

// [Note: A group in part]
// A module that did not run may have been used all the same, its weight by a
// loss.  No output of it tells when backward reads what that has saved, so the
// unit stays gathered until then, as FSDP2's does.
void Unit::end_group_forward() {
  if (group_.under_way()) {
    group_.end();
    end_forward(/*keep=*/at::GradMode::is_enabled());
  }
}

void Unit::end_forward(bool keep) {
  input_bytes_ = 0;
  if (!settings_->leaf_module) {
    leaves().assume_saved();
  } else if (!rows_.looks_up()) {
    leaves().look_for_saved(buffers());
  }
  if (settings_->reshard_after_forward && !keep) {
    const auto& part_of = settings_->post_forward_group;
    if (part_of && parameters_.state() == UnitState::unsharded) {
      parameters_.reshard_but_part(*part_of, settings_->keep_unsharded_storage);
    } else {
      reshard();
    }
  }
  prefetch_.forget_forward();
  root_->leave_forward(*this);
}

}  // namespace lowtide::shard
