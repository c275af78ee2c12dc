#include "shard/unit.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/graph_task.h"
#include "base/trace.h"
#include "shard/policy.h"
#include "shard/root.h"

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

Prefetch::Next as_ahead(const Units& units) {
  return {units.begin(), units.end()};
}

}  // namespace

Unit::Unit(std::string name, std::vector<ParameterInfo> infos,
           UnitGroups groups, std::shared_ptr<memory::DeviceMemory> memory,
           std::shared_ptr<UnitSettings> settings, std::size_t modules)
    : name_(std::make_shared<std::string>(std::move(name))),
      infos_(std::move(infos)),
      groups_(std::move(groups)),
      memory_(std::move(memory)),
      settings_(std::move(settings)),
      parameters_(name_, infos_, *groups_.gather, memory_, settings_->host),
      group_(modules),
      gradients_(name_, infos_, buffers().layout(), groups_.reduce,
                 settings_->reduction, memory_, settings_->host),
      rows_(name_, *settings_, groups_.gather, parameters_, gradients_, memory_,
            *this),
      arriving_(infos_, leaves(), gradients_),
      fused_(name_, infos_, buffers().layout(), gradients_, memory_) {}

// After an exception gradients may be on their way, from bytes that go back to
// compute now.
Unit::~Unit() {
  try {
    if (root_) {
      root_->forget(*this);
    }
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: unit '" << *name_
               << "': giving its bytes back failed: " << error.what();
  }
}

// --- before the first forward -----------------------------------------------

void Unit::attach(std::vector<at::Tensor> shards, std::vector<at::Tensor> full,
                  std::unique_ptr<ModuleView> view,
                  std::unique_ptr<AllGatherExtension> extension,
                  const std::vector<at::Tensor>& locals) {
  buffers().use(std::move(extension));
  if (leaves().attach(std::move(shards), std::move(full), std::move(view),
                      weak_from_this())) {
    arriving_.watch_leaves();
    fused_.list(leaves());
  } else {
    arriving_.watch_shards();
  }
  std::vector<ShardedGradients::Parameter> parameters;
  for (std::size_t i = 0; i < leaves().size(); ++i) {
    const auto& slice = buffers().slice(i);
    const auto rank = groups_.gather->rank();
    parameters.push_back(
        {leaves().shards()[i],
         infos_[i].local_sizes(groups_.gather->size(), slice.local_rows(rank)),
         slice.local_numel(rank), slice.shard_numel,
         infos_[i].dtype_of_grad()});
  }
  gradients_.sharded().set_parameters(std::move(parameters));
  parameters_.watch_shards(leaves().shards(), locals);
  if (!gradients_.accumulating()) {
    gradients_.plan(leaves().trainable(),
                    ring_bytes_alone(root_ ? root_->gradient_budget()
                                           : kDefaultRingBudget));
  }
}

void Unit::detach() {
  arriving_.unwatch_shards();
  parameters_.watch_shards({}, {});
  leaves().detach();
  gradients_.sharded().set_parameters({});
}

void Unit::rename(std::string name,
                  const std::vector<std::string>& parameters) {
  *name_ = std::move(name);
  infos_.rename(parameters);
  buffers().names_changed();
}

void Unit::join(std::shared_ptr<Root> root, std::int32_t number,
                bool outermost) {
  root_ = std::move(root);
  number_ = number;
  outermost_ = outermost;
  gradients_.set_number(number);
}

void Unit::use_groups(UnitGroups groups) {
  gradients_.use_group(groups.reduce);
  groups.host = groups_.host;
  groups_ = std::move(groups);
}

void Unit::fuse_gradients(const std::vector<bool>& fused) {
  if (fused_.choose(fused)) {
    fused_.list(leaves());
    if (leaves().size() > 0) replan();  // otherwise attach plans
  }
}

void Unit::replan() {
  if (root_) {
    root_->replan(*this);
  } else {
    gradients_.plan(leaves().trainable(), ring_bytes_alone(kDefaultRingBudget));
  }
}

// Until the root plans for all of its units.
std::int64_t Unit::ring_bytes_alone(std::int64_t budget_bytes) const {
  const auto wire = gradients_.wire_bytes();
  return ring_bytes(budget_bytes, groups_.reduce->size(), wire,
                    gradients_.of_experts() ? wire : 0);
}

// --- parameters -------------------------------------------------------------

void Unit::require_awake() const {
  if (buffers().asleep()) {
    throw Error(base::error_text(
        base::concat("unit '", *name_, "'"), "parameters that are awake",
        "a forward or a gather while they sleep",
        "Call lowtide.wake(model) on every rank first."));
  }
}

void Unit::gather() {
  require_awake();
  const auto steps = root_ ? root_->optimizer_steps() : 0;
  const bool backward = base::in_backward();
  if (parameters_.here()) {
    if (backward || !parameters_.stale(steps)) {
      return;
    }
    reshard();
  }
  if (root_) {
    root_->log().note({StepNote::What::gather, number_});
  }
  parameters_.gather(*groups_.gather,
                     backward ? settings_->post_forward_group.get() : nullptr,
                     steps, /*timed=*/!backward);
}

void Unit::wait_for_gather() {
  if (parameters_.arrive()) {
    arriving_.watch_leaves();
    fused_.list(leaves());
  }
}

void Unit::unshard() {
  gather();
  wait_for_gather();
  leaves().show_full();
}

void Unit::reshard() {
  wait_for_gather();
  parameters_.reshard(settings_->keep_unsharded_storage);
}

void Unit::wait_for_host_copies() const {
  if (auto* const host = buffers().host()) host->wait();
}

void Unit::gather_ahead() {
  gather_alone_ahead();
  for (const auto& other : settings_->beside) {
    if (const auto unit = other.lock()) unit->gather_alone_ahead();
  }
}

void Unit::gather_alone_ahead() {
  if (rows_.streams() || parameters_.here()) {
    return;
  }
  gather();
  parameters_.set_ahead(true);
}

// [Note: Units beside each other]
// One `fully_shard` call whose parameters are on several meshes makes a unit
// for each.  They are entered one after the other and left in reverse, as if
// the first were around the others, and whoever gathers one ahead gathers them
// all.  Their backwards are one: gradients come in an order of their own.  What
// the ranks of one mesh agree on, those of another may not, and in the stream
// each stands behind the others; so nothing of them leaves before the next
// unit's backward begins, which all ranks see, and the sources of all may stay
// until that is over.

// --- forward ----------------------------------------------------------------

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
    next = as_ahead(root_->enter_forward(*this));
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

// --- what ranks have in common ----------------------------------------------

StepLog::Numbers Unit::numbers_to_compare() {
  auto graphs = calls_.graphs().own();
  if (root_->keeps_graph()) graphs.kept = 1;
  return OwnNumbers{.output_rows = output_rows_,
                    .saved = leaves().ever_saved(),
                    .graphs = graphs,
                    .listened = leaves().have_gradient_hooks() ||
                                settings_->on_gradients != nullptr,
                    .used_hash = leaves().used_hash(),
                    .calls_without_inputs = calls_.has_calls_without_inputs(
                        root_->optimizer_steps()),
                    .gather_ns = parameters_.gather_ns()}
      .to_compare();
}

void Unit::agree_on(const StepLog::Numbers& greatest) {
  common_ = CommonNumbers::of(greatest);
  calls_.graphs().agree_on(common_.graphs_of_any);
  calls_.agree_on_calls_without_inputs(common_.calls_without_inputs_of_any);
}

// Rank 0's first numbers stay, but one: inputs that want gradients, on one rank
// or later than in the first forward, have autograd save the parameters.
void Unit::agree_alone() {
  compared_ = false;
  common_.saved_by_any = !rows_.looks_up();
}

// --- backward ---------------------------------------------------------------

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
  prefetch_.expect(as_ahead(entered.next));
  return entered.around;
}

void Unit::on_output_gradient(std::int64_t call) {
  const base::TraceRange trace("lowtide::pre_backward", *name_);
  root_->open_backward();
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

// The tokens are known of this unit's ranks.  What others take part in does not
// wait for them: between two gradients the program may have calls of its own.
void Unit::prefetch_in_backward() {
  if (prefetch_.waits(settings_->backward_prefetch, gradients_.elements(),
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
  root_->open_backward();
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
  root_->open_backward();
  begin_backward();
  fused_.require_host(i);
  fused_.add_product(stream(), i, grad_output, input);
}

void Unit::on_parameter_gradient(std::int32_t i, at::Tensor gradient) {
  root_->open_backward();
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
  root_->open_backward();
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
    root_->open_backward();
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

// --- recovery ---------------------------------------------------------------

void Unit::abort(bool drop_gradients) {
  parameters_.abort();
  rows_.abort();
  prefetch_ = {};
  in_backward_ = false;
  group_.end();
  input_bytes_ = 0;
  calls_.clear();
  arriving_.expect_as_reduced();
  fused_.close_main_gradients();
  if (drop_gradients) {
    gradients_.abort();
    arriving_.clear();
  }
}

}  // namespace lowtide::shard
