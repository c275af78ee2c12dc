#include "shard/unit.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/trace.h"
#include "shard/policy.h"
#include "shard/root.h"
#include "shard/row_stream.h"

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

Unit::Unit(std::string name, std::vector<ParameterInfo> infos,
           UnitGroups groups, std::shared_ptr<memory::DeviceMemory> memory)
    : name_(std::make_shared<std::string>(std::move(name))),
      groups_(std::move(groups)),
      memory_(std::move(memory)),
      buffers_(name_, infos, groups_.gather->size(), groups_.gather->rank(),
               memory_),
      gradients_(name_, infos, buffers_, groups_.reduce, memory_),
      state_(name_),
      infos_(std::move(infos)) {}

// After an exception a gather or gradients may be on their way, to and from
// bytes that go back to compute now.
Unit::~Unit() {
  try {
    if (pending_gather_) {
      pending_gather_->abandon();
    }
    if (root_) {
      root_->forget(*this);
    }
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: unit '" << *name_
               << "': giving its bytes back failed: " << error.what();
  }
}

void Unit::attach(std::vector<at::Tensor> shards, std::vector<at::Tensor> full,
                  std::unique_ptr<ModuleView> view,
                  std::unique_ptr<AllGatherExtension> extension,
                  const std::vector<at::Tensor>& locals) {
  view_ = std::move(view);
  buffers_.use(std::move(extension));
  shards_ = std::move(shards);
  if (!std::equal(full.begin(), full.end(), full_.begin(), full_.end(),
                  [](const auto& one, const auto& other) {
                    return one.is_same(other);
                  })) {
    full_ = std::move(full);
    install_nodes();
  }
  std::vector<ShardedGradients::Parameter> parameters;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    auto sizes = infos_[i].local_sizes(
        groups_.gather->size(),
        buffers_.slice(i).local_rows(groups_.gather->rank()));
    parameters.push_back({shards_[i], std::move(sizes),
                          buffers_.slice(i).local_numel(groups_.gather->rank()),
                          buffers_.slice(i).shard_numel,
                          infos_[i].storage_dtype});
  }
  gradients_.sharded().set_parameters(std::move(parameters));
  auto watched = shards_;
  watched.insert(watched.end(), locals.begin(), locals.end());
  seen_shards_.watch(watched);
  watch_gradients();
  if (!gradients_.accumulating()) {
    plan_gradients(
        ring_bytes(root_ ? root_->gradient_budget() : kDefaultRingBudget,
                   gradients_.wire_bytes()));
  }
}

void Unit::watch_gradients() {
  drop_cleared_gradients();
  observed_.clear();
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    observed_.emplace_back(std::vector<at::Tensor>{shards_[i], full_[i]},
                           view_ ? view_->clears_gradients() : nullptr);
  }
  observe_gradients();
}

void Unit::detach() {
  drop_cleared_gradients();
  view_.reset();
  observed_.clear();
  seen_shards_.watch({});
  shards_.clear();
  gradients_.sharded().set_parameters({});
}

void Unit::rename(std::string name,
                  const std::vector<std::string>& parameters) {
  *name_ = std::move(name);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    infos_[i].name = parameters[i];
  }
  buffers_.rename(parameters);
  gradients_.rename_parameters(parameters);
}

void Unit::use_groups(UnitGroups groups) {
  gradients_.use_group(groups.reduce);
  groups.host = groups_.host;
  groups_ = std::move(groups);
}

void Unit::join(std::shared_ptr<Root> root, std::int32_t number) {
  root_ = std::move(root);
  number_ = number;
  gradients_.set_number(number);
}

// --- parameters -------------------------------------------------------------

void Unit::gather() {
  const auto steps = root_ ? root_->optimizer_steps() : 0;
  if (state() == UnitState::gathering || state() == UnitState::unsharded) {
    if (current_backward() != -1 || !seen_shards_.changed(steps)) {
      return;
    }
    reshard();
  }
  const base::TraceRange trace("lowtide::gather", *name_);
  seen_shards_.see(steps);
  if (root_) {
    root_->log().note({StepNote::What::gather, number_});
  }
  // Outside of backward the kept parts may be older than the shards.
  if (buffers_.keeps_part() && current_backward() != -1) {
    pending_gather_ = buffers_.gather_parts(*post_forward_group);
    gathers_parts_ = true;
  } else {
    buffers_.drop_part();
    pending_gather_ = buffers_.gather(*groups_.gather);
  }
  state_.on(UnitEvent::gather);
}

void Unit::wait_for_gather() {
  if (state() != UnitState::gathering) {
    return;
  }
  const base::TraceRange trace("lowtide::wait_for_gather", *name_);
  if (pending_gather_) {
    pending_gather_->wait();
    pending_gather_.reset();
    if (!gathers_parts_) {
      buffers_.unpack();
    }
  }
  make_extended();
  gathers_parts_ = false;
  buffers_.drop_part();
  buffers_.arrived();
  state_.on(UnitEvent::arrive);
}

void Unit::make_extended() {
  const auto made = buffers_.make_extended(gathers_parts_);
  std::size_t next = 0;
  for (std::size_t i = 0; next < made.size(); ++i) {
    if (infos_[i].extended) {
      full_[i] = made[next++];
      install_node(i);
      view_->replace_full(static_cast<std::int32_t>(i), full_[i]);
    }
  }
  if (!made.empty()) {
    written_.watch(full_, nodes_);
    watch_gradients();
  }
}

void Unit::show_full() {
  if (!shown_ && view_) {
    follow_shards();
    view_->show_full();
  }
  shown_ = true;
}

void Unit::unshard() {
  gather();
  wait_for_gather();
  show_full();
}

void Unit::reshard() {
  wait_for_gather();
  buffers_.drop_part();
  if (state() == UnitState::unsharded) {
    buffers_.release();
    state_.on(UnitEvent::reshard);
  }
  if (shown_ && view_) {
    view_->show_shards();
  }
  shown_ = prefetched_ = false;
}

void Unit::reshard_after_forward_now() {
  if (!post_forward_group || state() != UnitState::unsharded) {
    reshard();
    return;
  }
  buffers_.keep_part(post_forward_group->rank(), post_forward_group->size());
  state_.on(UnitEvent::reshard);
  if (shown_ && view_) {
    view_->show_shards();
  }
  shown_ = prefetched_ = false;
}

void Unit::prefetch(Unit& other) {
  if (other.streams_rows()) {
    return;
  }
  if (other.state() == UnitState::sharded ||
      other.state() == UnitState::reducing) {
    other.gather();
    other.prefetched_ = true;
  }
}

// --- forward ----------------------------------------------------------------

// [Note: Modules sharded together]
// The first module of a forward brings the parameters and the last one lets go
// of them.  A later module was entered after the first, so its nodes have
// higher sequence numbers: whatever of it this backward reaches has run when
// the inputs of the first recorded call are done, and watching those is enough.
// Outputs are watched of every module, for some may not run.
Unit::ForwardCall Unit::pre_forward(std::size_t module) {
  const base::TraceRange trace("lowtide::pre_forward", *name_);
  const bool rows = looks_up_rows();
  if (in_backward()) {
    // A recomputation; its backward follows.
    if (!rows) unshard();
    return {group_.began_with(module), true};
  }
  const bool begins = group_.begins_with(module, root_->forward_is_of(*this));
  Unit* next = nullptr;
  if (begins) {
    next = root_->enter_forward(*this);
    recorded_ = false;
  } else {
    root_->require_stream(*this, "its forward");
  }
  group_.enter(module, begins);
  if (!at::GradMode::is_enabled() && root_->recording()) {
    ++calls_without_grad_;
  }
  const bool watch = at::GradMode::is_enabled() && !recorded_;
  if (watch) {
    recorded_ = true;
    ++calls_without_inputs_;  // until watch_forward_inputs says otherwise
  }
  const ForwardCall call{begins, watch};
  if (rows) {
    follow_shards();
    next_in_forward_ = next;
    return call;
  }
  if (!begins) {
    unshard();  // the user may have resharded meanwhile
    return call;
  }
  gather();
  prefetched_ = false;
  // Issued before this unit's own kernels: the next gather then waits for
  // nothing but the unit before this one.
  prefetch_after(next);
  wait_for_gather();
  show_full();
  count_references();
  return call;
}

void Unit::prefetch_after(Unit* next) {
  if (!forward_prefetch.empty()) {
    for (const auto& other : forward_prefetch) {
      if (const auto unit = other.lock()) prefetch(*unit);
    }
  } else if (next != nullptr) {
    prefetch(*next);
  }
}

std::vector<at::Tensor> Unit::watch_forward_inputs(
    const std::vector<at::Tensor>& inputs) {
  auto watched = watch_inputs(inputs, weak_from_this());
  if (!in_backward()) {
    input_bytes_ = bytes_of(inputs);
    --calls_without_inputs_;
    open_calls_.push_back(std::move(watched.node));
  }
  return std::move(watched.tensors);
}

bool Unit::post_forward(const std::vector<at::Tensor>& outputs,
                        std::size_t module) {
  const base::TraceRange trace("lowtide::post_forward", *name_);
  output_rows_ = 0;
  for (const auto& output : outputs) {
    watch_output(output, weak_from_this());
    output_rows_ = std::max(output_rows_, rows_of(output));
  }
  if (in_backward()) {
    return group_.ended_with(module);
  }
  // Of the gradient of its output, which only its own backward needs.
  gradients_.set_room(
      std::max<std::int64_t>(0, bytes_of(outputs) - input_bytes_));
  const bool over = group_.leave(module, root_->forward_is_of(*this));
  if (over) end_forward();
  return over;
}

void Unit::end_group_forward() {
  if (group_.under_way()) {
    group_.end();
    end_forward();
  }
}

void Unit::end_forward() {
  input_bytes_ = 0;
  if (!looks_up_rows()) {
    ever_saved_ = ever_saved_ || autograd_saved_parameters();
  }
  if (reshard_after_forward) {
    reshard_after_forward_now();
  }
  next_in_forward_ = nullptr;
  root_->leave_forward(*this);
}

// [Note: Saved parameters]
// A leaf that autograd saves raises its TensorImpl's use count, a view of it
// that autograd saves raises the StorageImpl's: comparing both before and after
// the module's forward tells whether backward will read the parameters.
//
// A graph of an earlier forward may die meanwhile, when Python collects a
// caught exception, on one rank and not on another: what it gives back would
// hide what this forward saves, and a rank that does not gather leaves the
// others waiting.  So saving once counts forever: such a graph saved as well.
void Unit::count_references() {
  if (!leaf_module) {
    return;
  }
  references_.clear();
  for (std::size_t i = 0; i < full_.size(); ++i) {
    references_.emplace_back(full_[i].use_count(),
                             buffers_.storage(i).use_count());
  }
}

StepLog::Numbers Unit::numbers_to_compare() {
  const auto held = graphs_.own();
  const auto used = static_cast<std::int64_t>(used_hash() >> 1);
  return {-output_rows_, ever_saved_ ? 1 : 0,          held.kept,
          held.recorded, has_gradient_hooks() ? 1 : 0, used,
          -used};
}

void Unit::agree_on(const StepLog::Numbers& greatest) {
  rows_of_all_ = -greatest[0];
  saved_by_any_ = greatest[1] != 0;
  graphs_.agree_on({greatest[2], greatest[3]});
  listened_by_any_ = greatest[4] != 0;
  used_alike_ = greatest[5] == -greatest[6];
}

void Unit::agree_alone() {
  graphs_.agree_alone();
  listened_by_any_ = has_gradient_hooks();
}

bool Unit::autograd_saved_parameters() const {
  if (!leaf_module) {
    return true;
  }
  for (std::size_t i = 0; i < full_.size(); ++i) {
    if (static_cast<std::int64_t>(full_[i].use_count()) >
            references_[i].first ||
        buffers_.storage(i).use_count() > references_[i].second) {
      return true;
    }
  }
  return false;
}

void Unit::abort(bool drop_gradients) {
  if (pending_gather_) {
    try {
      pending_gather_->wait();
    } catch (const std::exception& error) {
      LOG(WARNING) << error.what();
    }
    pending_gather_.reset();
  }
  gathers_parts_ = false;
  buffers_.drop_part();
  buffers_.arrived();
  if (rows_) {
    rows_->abort();
  }
  if (shown_ && view_) {
    view_->show_shards();
  }
  buffers_.drop();
  state_.on(UnitEvent::abort);
  shown_ = prefetched_ = false;
  next_in_forward_ = next_in_backward_ = nullptr;
  in_backward_ = output_gradient_ = false;
  group_.end();
  input_bytes_ = 0;
  calls_without_grad_ = nested_calls_done_ = calls_without_inputs_ = 0;
  open_calls_.clear();
  done_now_.clear();
  done_before_.clear();
  graphs_.clear();
  for (std::size_t i = 0; i < main_gradients_.size(); ++i) {
    close_main_gradient(static_cast<std::int32_t>(i));
  }
  if (drop_gradients) {
    written_.clear();
    gradients_.abort();
    observe_gradients();
  }
}

}  // namespace lowtide::shard
