// What a unit does in backward: what the graph and its rows tell it, and how
// its gradients leave.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/graph_task.h"
#include "base/trace.h"
#include "shard/policy.h"
#include "shard/root.h"
#include "shard/unit.h"

namespace lowtide::shard {

bool Unit::is_gathered_in_backward() const {
  return settings_->unshard_in_backward &&
         (common_.saved_by_any || !settings_->leaf_module);
}

std::int64_t Unit::elements_to_cover(std::int64_t tokens) const {
  return elements_that_cover(buffers().gathered_bytes(), groups_.gather->size(),
                             tokens, common_.gather_ns);
}

// Returns the unit whose call that call was in, or null.
Unit* Unit::enter_backward(std::int64_t call) {
  auto entered = root_->enter_backward(*this, call);
  expects_own_ranks_ =
      std::ranges::all_of(entered.next, [this](const Unit* next) {
        return next->groups_.gather == groups_.gather;
      });
  prefetch_.expect({entered.next.begin(), entered.next.end()});
  return entered.around;
}

void Unit::on_output_gradient(std::int64_t call) {
  const base::TraceRange trace("lowtide::pre_backward", *name_);
  root_->open_backward(*this, call);
  begin_backward();
  const bool entered = calls_.enter_backward(call);
  Unit* around = nullptr;
  if (entered) {
    around = enter_backward(call);
  }
  if (is_gathered_in_backward()) {
    gather();
  }
  parameters_.set_ahead(false);
  if (entered) {
    prefetch_in_backward();
    gradients_.set_lingering(
        std::max(lingering_bytes(), std::exchange(lingers_inside_, 0)));
    if (around != nullptr) around->linger_inside(gradients_.lingering_bytes());
    // After the gather, which must not wait for other units' gradients.
    root_->stream().expects(gradients_);
    if (fused_.has_main_gradients()) {
      fused_.open_main_gradients(stream());
    }
  }
  if (is_gathered_in_backward()) {
    wait_for_gather();
    leaves().show_full();
  }
  arriving_.expect_as_computed();
}

// Other calls of the module or the units inside it take their own time before
// its gradients come.
std::int64_t Unit::tokens_of_gradients() const {
  const bool come_now =
      gradients_.leaves_early() && !rows_.delivers_gradients();
  return come_now ? common_.fewest_rows : 0;
}

bool Unit::wire_outlasts() const {
  if (gradients_.source_bytes() < root_->lingering_from()) {
    return false;
  }
  const auto elements = gradients_.elements();
  const auto gathered = buffers().gathered_bytes();
  const auto ranks = groups_.gather->size();
  return wire_outlasts_backward(
      is_gathered_in_backward() ? gathered : 0,
      gradients_.sync() ? gradients_.wire_bytes() : 0, ranks,
      std::accumulate(elements.begin(), elements.end(), std::int64_t{0}),
      tokens_of_gradients(), slow_link(gathered, ranks, common_.gather_ns));
}

std::int64_t Unit::lingering_bytes() const {
  if (settings_->beside.empty()) {
    return wire_outlasts() ? gradients_.source_bytes() : 0;
  }
  auto bytes = gradients_.source_bytes();
  for (const auto& other : settings_->beside) {
    if (const auto unit = other.lock())
      bytes += unit->gradients().source_bytes();
  }
  return bytes;
}

// What a unit around others computes before and behind them hides what they
// left to the wire.  Before: by the last backward.
void Unit::linger_inside(std::int64_t bytes) {
  if (outermost_) {
    return;
  }
  lingers_inside_ = std::max(lingers_inside_, bytes);
  gradients_.set_lingering(std::max(gradients_.lingering_bytes(), bytes));
}

// Without a comparison the tokens are known of this unit's ranks.  What others
// take part in does not wait for them: between two gradients the program may
// have calls of its own.
void Unit::prefetch_in_backward() {
  if (prefetch_.waits(root_->reached(settings_->backward_prefetch),
                      gradients_.elements(),
                      expects_own_ranks_ ? tokens_of_gradients() : 0) &&
      root_->stream().contains(gradients_)) {
    root_->stream().precede(gradients_, prefetch_.gradients_before(),
                            [this] { prefetch_.gather_expected(); });
  }
}

void Unit::begin_backward() {
  if (in_backward_) {
    return;
  }
  arriving_.drop_cleared();
  in_backward_ = scheduled_ = true;
  calls_.begin_backward();
  fused_.begin_backward();
  gradients_.begin(settings_->gradient_sync);
  gradients_.on_landed = nullptr;
  if (gradients_.sync() && common_.listened_by_any) {
    gradients_.on_landed = [this] { publish_gradients(); };
  }
  gradients_.expect_hosts_to_tell(root_->log().compares() && groups_.host &&
                                  common_.left_out_by_any);
}

GradientStream* Unit::stream() {
  if (!gradients_.sync()) {
    return nullptr;
  }
  auto& stream = root_->stream();
  if (!stream.contains(gradients_)) {
    stream.append(gradients_);
  }
  return &stream;
}

bool Unit::on_product(std::int32_t i, const at::Tensor& grad_output,
                      const at::Tensor& input, Obstacle obstacle) {
  if (!arriving_.wants(i)) {
    return true;
  }
  if (!gradients_.in_place(i)) {
    return false;
  }
  root_->open_backward(*this);
  begin_backward();
  if (!fused_.admits(i, obstacle)) {
    return false;
  }
  fused_.add_product(stream(), i, grad_output, input);
  return true;
}

void Unit::on_only_product(std::int32_t i, const at::Tensor& grad_output,
                           const at::Tensor& input) {
  if (!arriving_.wants(i)) {
    return;
  }
  root_->open_backward(*this);
  begin_backward();
  fused_.require_host(i);
  fused_.add_product(stream(), i, grad_output, input);
}

void Unit::on_parameter_gradient(std::int32_t i, at::Tensor gradient) {
  root_->open_backward(*this);
  begin_backward();
  if (!arriving_.wants(i)) {
    return;
  }
  arriving_.deliver(
      stream(), i,
      fused_.what_is_missing(i, std::move(gradient), leaves().view()),
      root_->nested_backward());
  if (!prefetch_.on_gradient()) {
    return;
  }
  if (root_->stream().contains(gradients_)) {
    root_->stream().gather_if_next(gradients_);
  } else {
    prefetch_.gather_expected();
  }
}

void Unit::take_written_gradients() {
  if (in_backward_ && !gradients_.sealed() && arriving_.has_written()) {
    arriving_.deliver_written(stream(), root_->nested_backward());
  }
}

void Unit::on_gradient_returned(std::int32_t i) {
  arriving_.on_returned(i, /*idle=*/!in_backward_);
}

void Unit::on_recorded_backward(WeakNodePtr result) {
  calls_.graphs().record(std::move(result));
}

void Unit::on_inputs_done(const torch::autograd::Node* node) {
  const base::TraceRange trace("lowtide::post_backward", *name_);
  root_->open_backward(*this);
  // As torch's schedules set it for the backwards that they split.
  if (!settings_->reshard_after_backward && !gradients_.sync()) {
    arriving_.on_inputs_done();
  }
  arriving_.expect_as_reduced();
  if (calls_.complete(node, root_->nested_backward(), base::in_graph_task) &&
      (compared_ || scheduled_)) {
    finish_backward();
  }
  prefetch_.gather_expected();  // chunks of other units are ahead of this one's
}

// All gradients of this unit have been seen, and nobody reads its parameters.
void Unit::finish_backward() {
  if (outermost_) {
    return;
  }
  take_written_gradients();
  gradients_.add_small();
  if (gradients_.sync() && settings_->beside.empty() &&
      root_->stream().contains(gradients_)) {
    root_->stream().seal(gradients_);
  }
  if (settings_->reshard_after_backward) {
    parameters_.seal(settings_->keep_unsharded_storage);
  }
}

// [Note: Hooks on gradients]
// A post-accumulate hook, or an optimizer in backward, wants its gradient as
// soon as it is there: such a unit lands when its last chunk has left, also on
// ranks that have no hook, because sums over replicas then leave as well.  All
// others land when their slots are needed and become `.grad` at the end.
void Unit::publish_gradients() {
  const bool any = gradients_.publish(
      settings_->reduction.unused_too ? leaves().trainable()
                                      : std::vector<bool>(),
      [view = leaves().view()](const auto& which, const auto& locals) {
        return view != nullptr ? view->wrap_gradients(which, locals) : locals;
      });
  if (any && settings_->on_gradients) settings_->on_gradients();
  arriving_.taken(settings_->on_gradients != nullptr);
}

void Unit::end_backward(bool more_backwards, bool graph_kept) {
  if (in_backward_ && gradients_.sync()) {
    publish_gradients();
  }
  fused_.close_main_gradients();
  if (in_backward_) {
    gradients_.end();
    arriving_.observe();
    arriving_.expect_as_reduced();
  }
  in_backward_ = false;
  prefetch_.forget_backward();
  calls_.end_backward(more_backwards, graph_kept, root_->optimizer_steps());
  parameters_.drain();
  if (settings_->reshard_after_backward) {
    reshard();
  }
}

// --- rows -------------------------------------------------------------------

void Unit::on_rows_begin(RowPass pass) {
  require_awake();
  if (!root_) {
    throw Error(base::error_text(
        base::concat("unit '", *name_, "'"),
        "a forward of the root module before its rows are read", "none yet",
        "Call the loss inside the root's forward, or after it."));
  }
  if (pass == RowPass::backward) {
    root_->open_backward(*this);
    begin_backward();
    if (!calls_.inside_backward()) {  // not called as a module
      enter_backward(Schedule::kNoCall);
    }
  } else if (pass != RowPass::lookup) {
    root_->enter_rows(*this, pass == RowPass::recorded);
  }
}

void Unit::on_rows_gather(std::int64_t k) {
  root_->log().note({StepNote::What::rows, number_, k});
}

void Unit::on_last_rows(RowPass pass) {
  if (pass == RowPass::backward) {
    prefetch_in_backward();
  } else {
    prefetch_.gather_put_off(settings_->forward_prefetch);
  }
}

void Unit::on_row_gradient(std::int64_t block, at::Tensor rows) {
  if (!arriving_.wants(0)) {
    return;
  }
  if (auto* const out = stream()) {
    out->accept_rows(gradients_, 0, block, std::move(rows));
    if (block + 1 == gradients_.num_blocks(0)) {
      finish_backward();
    }
  } else {
    gradients_.accumulate_rows(0, block, rows);
  }
}

}  // namespace lowtide::shard
