#include "shard/root.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/graph_task.h"
#include "base/trace.h"
#include "device/current_stream.h"
#include "device/on_stream.h"
#include "shard/graph/autograd_nodes.h"
#include "shard/unit.h"

namespace lowtide::shard {

Root::Root(std::string name, std::shared_ptr<memory::DeviceMemory> memory)
    : name_(std::move(name)),
      memory_(std::move(memory)),
      ranks_(name_, units_),
      plans_(name_, units_, ranks_.log()),
      stream_(name_, memory_, ranks_.log()) {}

void Root::adopt(const std::vector<std::shared_ptr<Unit>>& units,
                 std::shared_ptr<comm::HostChannel> everyone) {
  LOWTIDE_INVARIANT(units_.empty(), "a root adopts its units once");
  for (const auto& unit : units) {
    const auto& beside = unit->settings().beside;
    const bool first = unit == units.front() ||
                       std::ranges::any_of(beside, [&](const auto& other) {
                         return other.lock() == units.front();
                       });
    unit->join(shared_from_this(), static_cast<std::int32_t>(units_.size()),
               first && unit->settings().encloses_units);
    units_.push_back(unit.get());
  }
  schedule_ = Schedule(static_cast<std::int32_t>(units_.size()));
  plans_.forget();
  ranks_.begin(std::move(everyone));
}

void Root::forget(const Unit& unit) {
  std::replace(units_.begin(), units_.end(), const_cast<Unit*>(&unit),
               static_cast<Unit*>(nullptr));
  // Autograd's thread may not yet have told that the backward failed.
  if (failed_ || stream_.contains(unit.gradients())) {
    stream_.abandon();  // it works on bytes that go now
  }
}

// --- forward ----------------------------------------------------------------

namespace {

// More than any schedule has under way; a frozen model that is called again and
// again with grad mode on has no backward.
constexpr std::size_t kMostOpenForwards = 1024;

}  // namespace

Units Root::enter_forward(Unit& unit) {
  // Entered again from outside, or from a module around it: the forward before
  // did not return.
  const bool raised =
      forward_root_ != nullptr &&
      (forward_root_ == &unit || (unit.settings().encloses_units &&
                                  unit.number() < forward_root_->number()));
  if (forward_root_ == nullptr || raised) {
    if (raised || failed_ || backward_ != -1) {
      abort(/*drop_gradients=*/failed_ || backward_ != -1 || recorded_);
    }
    begin_forward(unit);
  }
  require_stream(unit, "its forward");
  return living_of(schedule_.enter_forward(unit.number()));
}

Units Root::living_of(const std::vector<std::int32_t>& numbers) const {
  Units units;
  for (const auto number : numbers) {
    if (auto* const unit = units_[static_cast<std::size_t>(number)]) {
      units.push_back(unit);
    }
  }
  return units;
}

// [Note: One compute stream]
// What a unit frees serves whatever comes next on the stream that its bytes are
// from, and a unit is gathered, with bytes of the stream that is current then,
// before its own forward begins.  A loss that reads rows gathers its neighbours
// ahead.
void Root::require_stream(const Unit& unit, const char* what) const {
  const auto current = device::current_stream(memory_->runtime().device());
  if (!forward_stream_ || current == *forward_stream_) return;
  throw Error(base::error_text(
      base::concat("unit '", unit.name(), "'"),
      base::concat(what, " on the stream that the forward of '", name_,
                   "' began on"),
      "another stream",
      "Enter the stream around the whole forward, its loss included, or shard "
      "the module that switches streams instead of those inside it: a unit's "
      "own forward may use other streams if it waits for them before it "
      "returns."));
}

void Root::begin_forward(Unit& unit) {
  if (ranks_.compares()) {
    require_agreement();  // of a forward that no backward followed
  }
  forward_root_ = &unit;
  forward_stream_ = device::current_stream(memory_->runtime().device());
  recorded_ = at::GradMode::is_enabled();
  detached_ = false;
  // Recorded forwards whose backward never came are no longer expected.
  if (std::exchange(forward_at_step_, optimizer_steps_) != optimizer_steps_ ||
      schedule_.open_forwards() >= kMostOpenForwards) {
    schedule_.forget_forwards();
  }
  schedule_.begin_forward();
  if (recorded_) {
    recorded_stream_ = forward_stream_;
    for (auto* one : living(units_)) {
      one->parameters().leaves().follow_current_stream();
      one->parameters().leaves().begin_uses();
    }
    ranks_.note_frozen();
    plans_.plan();
  }
}

void Root::leave_forward(Unit& unit) {
  if (forward_root_ == &unit) {
    for (auto* one : living(units_)) one->end_group_forward();
  }
  schedule_.leave_forward(unit.number(), at::GradMode::is_enabled(),
                          unit.forward_call_);
  if (forward_root_ == &unit) {
    end_forward();
  }
}

void Root::note_inputs(const std::vector<at::Tensor>& inputs) {
  detached_ = recorded_ && forward_root_ != units_.front() &&
              are_made_of_leaves(inputs);
}

void Root::enter_rows(const Unit& unit, bool recorded) {
  require_stream(unit, "its rows to be read");
  if (recorded) schedule_.leave_forward(unit.number(), recorded);
}

void Root::replan(Unit& unit) {
  if (backward_ != -1 || unit.gradients().accumulating()) {
    throw Error(base::error_text(
        base::concat("unit '", unit.name(), "'"),
        "its rows to be streamed from the beginning of a step on",
        "gradients of it that are not reduced yet",
        "Call lowtide.losses.stream_rows before the first backward."));
  }
  plans_.plan_of(unit);
}

void Root::end_forward() {
  schedule_.end_forward(detached_);
  if (recorded_) {
    if (!detached_) forward_root_->attached_at_step_ = optimizer_steps_;
    log().note({StepNote::What::forward});
  }
  forward_root_ = nullptr;
  ranks_.ask();
  for (auto* unit : living(units_)) {
    // Gathered for a forward that did not come.
    if (unit->parameters().ahead()) {
      // Ranks that differ may lack this gather, which would wait for them.
      if (ranks_.compares()) require_agreement();
      unit->reshard();
    }
    unit->wait_for_host_copies();
  }
}

// --- gradients' way out -----------------------------------------------------

Units Root::participants(std::optional<std::size_t> forward) {
  auto order = schedule_.completion_order(forward);
  if (!forward) {
    plans_.expect(std::move(order));
    order = plans_.order();
  }
  auto units = living_of(order);
  // Those that only an earlier microbatch used reduce what it left, and
  // parameters that the user has gathered may be used without a forward.
  for (auto* unit : living(units_)) {
    const bool gathered = unit->parameters().state() == UnitState::unsharded;
    if ((unit->gradients().accumulating() || (!forward && gathered)) &&
        std::find(units.begin(), units.end(), unit) == units.end()) {
      units.push_back(unit);
    }
  }
  std::stable_partition(units.begin(), units.end(),
                        [](const Unit* unit) { return !unit->outermost(); });
  return units;
}

// --- backward ---------------------------------------------------------------

void Root::open_backward(const Unit& unit, std::int64_t call) {
  if (failed_) {
    abort();
  }
  if (backward_ != -1) {
    if (backward_of_ && !unit.in_backward_) {
      join_others();
    }
    return;
  }
  require_agreement();
  plans_.extend();
  ranks_.note_settings();
  ranks_.note_frozen();
  backward_ = base::current_graph_task();
  graph_kept_ = base::graph_task_keeps_graph();
  LOWTIDE_INVARIANT(backward_ != -1, "autograd runs on this thread");
  count_backward();
  backward_of_ = detached_on_all(unit, call);
  stream_.begin();
  take_part(participants(backward_of_));
  // What is left of a step that raised is dropped before anything else happens.
  base::at_end_of_graph_task(
      [self = shared_from_this()] {
        // [Note: The end of a backward]
        device::run_on(self->memory_->runtime(), self->recorded_stream_,
                       [&] { self->close_backward(); });
      },
      [root = weak_from_this()] {
        if (const auto alive = root.lock()) {
          alive->failed_ = true;
        }
      });
}

// Where a rank has called the unit otherwise, that is noted of the one that the
// forward began with.
std::optional<std::size_t> Root::detached_on_all(const Unit& unit,
                                                 std::int64_t call) const {
  if (call == Schedule::kNoCall) return {};
  const auto forward = schedule_.detached_of(unit.number(), call);
  if (!forward) return {};
  const auto* const first =
      units_[static_cast<std::size_t>(schedule_.first_of(*forward))];
  return first != nullptr && !first->common_.attached_on_any ? forward
                                                             : std::nullopt;
}

void Root::take_part(const Units& units) {
  for (auto* unit : units) {
    unit->begin_backward();
    if (unit->gradients().sync() && !stream_.contains(unit->gradients())) {
      stream_.append(unit->gradients());
    }
  }
  in_backward_.insert(in_backward_.end(), units.begin(), units.end());
}

// It goes on through other forwards: as if they were one from here on.
void Root::join_others() {
  backward_of_.reset();
  posted_backward_ = false;
  auto others = participants();
  std::erase_if(others, [](const Unit* unit) { return unit->in_backward_; });
  take_part(others);
}

void Root::count_backward() {
  if (ended_backward_ != backwards_) raised_backwards_.push_back(backwards_);
  ++backwards_;
}

bool Root::ended(std::int64_t number) const {
  return number == ended_backward_ ||
         (number < backwards_ && std::ranges::find(raised_backwards_, number) ==
                                     raised_backwards_.end());
}

// [Note: Graphs that are kept]
// A graph that an earlier backward kept may be gone through again together with
// a later one, behind it.  Whether ranks still hold such a graph they tell each
// other with the numbers they compare; a unit without inputs that autograd
// follows has no node to know by, so whatever was kept counts as held until the
// optimizer steps.  Where ranks are not compared a graph that one of them kept
// must not move its calls: there a later graph may not run together with one
// that was kept, which raises where its gradients come late.
bool Root::all_run_in_order() const {
  return std::ranges::all_of(living(units_), [](const Unit* unit) {
    return !unit->in_kept_graph() && unit->runs_in_order();
  });
}

bool Root::nested_backward() const {
  return base::current_graph_task() != backward_;
}

Root::BackwardCall Root::enter_backward(Unit& unit, std::int64_t number) {
  const auto call =
      schedule_.enter_backward(unit.number(), number, backward_of_);
  log().note({StepNote::What::backward, unit.number()});
  if (call.earliest && !posted_backward_) {
    // Nothing but this unit's backward follows, which the ranks' answers hide
    // behind.
    posted_backward_ = true;
    ranks_.ask();
  }
  if (!call.place) unit.runs_out_of_schedule();
  const bool in_order = call.place && !nested_backward() && all_run_in_order();
  if (in_order) {
    stream_.seal_leading([&](const UnitGradients& gradients) {
      return schedule_.is_over(gradients.number(), *call.place);
    });
  }
  // Behind what others sent: nothing of this unit has left yet.
  unit.gradients().set_leaves_early(in_order && call.last && call.alone &&
                                    unit.settings().beside.empty() &&
                                    unit.used_alike());
  auto* const around =
      call.around ? units_[static_cast<std::size_t>(*call.around)] : nullptr;
  return {living_of(call.next), around};
}

// The next chunk's forward would drop what this one's backward has gathered and
// does not come to.
Prefetch::Listed Root::reached(const Prefetch::Listed& listed) const {
  auto units = listed;
  if (backward_of_) {
    const auto within = schedule_.completion_order(backward_of_);
    std::erase_if(units, [&](const auto& one) {
      const auto unit = one.lock();
      return !unit || std::ranges::find(within, unit->number()) == within.end();
    });
  }
  return units;
}

// --- what ranks must have in common ------------------------------------------

void Root::require_agreement() {
  try {
    ranks_.require();
  } catch (...) {
    failed_ = true;
    // Whatever was learned from steps in which ranks differed.
    schedule_ = Schedule(static_cast<std::int32_t>(units_.size()));
    plans_.forget();
    throw;
  }
}

void Root::reduce_accumulated() {
  if (failed_) {
    abort();
  }
  LOWTIDE_INVARIANT(backward_ == -1 && base::current_graph_task() == -1,
                    "no backward is under way");
  for (auto* unit : living(units_)) unit->require_split_backward_complete();
  ranks_.note_settings();
  count_backward();
  auto units = participants();
  std::erase_if(units, [](const Unit* unit) {
    return !unit->gradients().accumulating();
  });
  try {
    stream_.begin();
    take_part(units);
    close_backward();
  } catch (...) {
    failed_ = true;
    throw;
  }
}

// [Note: The end of a backward]
// The engine runs nodes on the stream of their forward, and what it calls at
// the end on the stream that backward() was called on.  The gradients whose
// bytes go then are the forward stream's, which must come after their last use.
void Root::close_backward() {
  const base::TraceRange trace("lowtide::end_of_backward", name_);
  for (auto* unit : living(units_)) unit->take_written_gradients();
  stream_.finish();
  // Behind what has left, which some ranks seal later than others.
  if (!posted_backward_) {
    ranks_.ask();
  }
  posted_backward_ = false;
  ranks_.ask_who_has_gradients();
  if (ranks_.compares()) {
    require_agreement();
  }
  // Of other forwards units wait for their own, gathered as they are.
  const bool alone = backward_of_.has_value();
  backward_of_.reset();
  if (!alone) plans_.refine_order(in_backward_);
  captured_ |= memory_->runtime().capturing();
  schedule_.end_backward();
  const bool more_backwards = schedule_.open_forwards() > 0;
  for (auto* unit : living(alone ? in_backward_ : units_)) {
    unit->end_backward(more_backwards, graph_kept_);
    unit->wait_for_host_copies();
  }
  if (std::exchange(graph_kept_, false)) kept_at_step_ = optimizer_steps_;
  in_backward_.clear();
  backward_ = -1;
  ended_backward_ = backwards_;
}

void Root::optimizer_stepped() {
  ++optimizer_steps_;
  if (!captured_) return;
  for (const auto* unit : living(units_)) {
    unit->gradients().require_as_captured();
  }
}

// --- recovery ---------------------------------------------------------------

void Root::abort(bool drop_gradients) {
  device::run_on(memory_->runtime(),
                 backward_ == -1 ? forward_stream_ : recorded_stream_,
                 [&] { abort_here(drop_gradients); });
}

void Root::abort_here(bool drop_gradients) {
  stream_.abort();
  for (auto* unit : living(units_)) {
    unit->abort(drop_gradients);
    unit->wait_for_host_copies();
  }
  schedule_.abort();
  log().forget();
  posted_backward_ = false;
  in_backward_.clear();
  backward_of_.reset();
  forward_root_ = nullptr;
  recorded_ = detached_ = false;
  backward_ = -1;
  failed_ = false;
}

}  // namespace lowtide::shard
