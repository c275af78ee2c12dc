#include "shard/root.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/graph_task.h"
#include "base/trace.h"
#include "device/current_stream.h"
#include "shard/graph/autograd_nodes.h"
#include "shard/unit.h"

namespace lowtide::shard {

Root::Root(std::string name, std::shared_ptr<memory::DeviceMemory> memory)
    : name_(std::move(name)),
      memory_(std::move(memory)),
      ranks_(name_, units_),
      stream_(name_, memory_, ranks_.log()) {}

void Root::adopt(const std::vector<std::shared_ptr<Unit>>& units) {
  LOWTIDE_INVARIANT(units_.empty(), "a root adopts its units once");
  for (const auto& unit : units) {
    unit->join(shared_from_this(), static_cast<std::int32_t>(units_.size()));
    units_.push_back(unit.get());
  }
  schedule_ = Schedule(static_cast<std::int32_t>(units_.size()));
  last_order_.resize(units_.size());
  std::iota(last_order_.rbegin(), last_order_.rend(), 0);
  ranks_.begin();
}

void Root::forget(const Unit& unit) {
  std::replace(units_.begin(), units_.end(), const_cast<Unit*>(&unit),
               static_cast<Unit*>(nullptr));
  // Autograd's thread may not yet have told that the backward failed.
  if (failed_ || stream_.contains(unit.gradients())) {
    stream_.abandon();  // it works on bytes that go now
  }
}

void Root::set_gradient_budget(std::int64_t bytes) {
  if (bytes <= 0) {
    throw InvalidArgument(
        base::error_text(base::concat("gradient budget of '", name_, "'"),
                         "a positive number of bytes", base::concat(bytes),
                         "The default is 64 MiB."));
  }
  gradient_budget_ = bytes;
  planned_ = false;
}

// --- forward ----------------------------------------------------------------

namespace {

// More than any schedule has under way; a frozen model that is called again and
// again with grad mode on has no backward.
constexpr std::int64_t kMostOpenForwards = 1024;

}  // namespace

Unit* Root::enter_forward(Unit& unit) {
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
  const auto next = schedule_.enter_forward(unit.number());
  return next ? units_[static_cast<std::size_t>(*next)] : nullptr;
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
  // Recorded forwards whose backward never came are no longer expected.
  if (std::exchange(forward_at_step_, optimizer_steps_) != optimizer_steps_ ||
      open_forwards_ == kMostOpenForwards) {
    schedule_.end_backward();
    open_forwards_ = 0;
  }
  schedule_.begin_forward();
  if (recorded_) {
    for (auto* one : units_) {
      if (one != nullptr) one->parameters().leaves().follow_current_stream();
    }
    ranks_.note_frozen();
    plan_gradients();
  }
}

void Root::leave_forward(Unit& unit) {
  if (forward_root_ == &unit) {
    for (auto* one : units_) {
      if (one != nullptr) one->end_group_forward();
    }
  }
  schedule_.leave_forward(unit.number(), at::GradMode::is_enabled(),
                          unit.forward_call_);
  if (forward_root_ == &unit) {
    end_forward();
  }
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
  plan_gradients_of(unit);
}

void Root::end_forward() {
  schedule_.end_forward();
  forward_root_ = nullptr;
  if (recorded_) {
    log().note({StepNote::What::forward});
  }
  ranks_.ask();
  open_forwards_ += recorded_ ? 1 : 0;
  for (auto* unit : units_) {
    if (unit != nullptr && unit->parameters().ahead()) {
      // Ranks that differ may lack this gather, which would wait for them.
      if (ranks_.compares()) require_agreement();
      unit->reshard();
    }
  }
}

// --- gradients' way out -----------------------------------------------------

namespace {

// A frozen parameter may have any dtype; it may have been unfrozen since.
void require_reducible(const Unit& unit, const std::vector<bool>& trainable) {
  for (std::size_t i = 0; i < trainable.size(); ++i) {
    const auto dtype = unit.parameters().infos()[i].reduce_dtype;
    const bool narrow = dtype != at::kBFloat16 && dtype != at::kHalf &&
                        at::isFloatingType(dtype) &&
                        c10::elementSize(dtype) < sizeof(float);
    if (trainable[i] && narrow) {
      throw InvalidArgument(base::error_text(
          base::concat("unit '", unit.name(), "'"),
          base::concat(unit.parameters().infos()[i].name,
                       ", which has begun to require grad, to be reduced in "
                       "torch.float32, torch.bfloat16, torch.float16 or "
                       "torch.float64"),
          base::concat(dtype),
          "Freeze it again, or pass MixedPrecisionPolicy(reduce_dtype="
          "torch.float32) to fully_shard."));
    }
  }
}

}  // namespace

// The plan depends on which parameters are trainable and on the budget: both
// change only between forwards, on all ranks alike.
void Root::plan_gradients() {
  std::vector<std::vector<bool>> trainable;
  trainable.reserve(units_.size());
  for (auto* unit : units_) {
    trainable.push_back(unit != nullptr
                            ? unit->parameters().leaves().trainable()
                            : std::vector<bool>());
  }
  if (planned_ && trainable == planned_trainable_) {
    return;
  }
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (units_[u] != nullptr) require_reducible(*units_[u], trainable[u]);
  }
  bool complete = true;
  log().note(
      {StepNote::What::settings, -1, gradient_budget()},
      base::concat("a gradient budget of ", gradient_budget(), " bytes"));
  for (std::size_t u = 0; u < units_.size(); ++u) {
    auto* unit = units_[u];
    if (unit == nullptr ||
        (planned_ && trainable[u] == planned_trainable_[u])) {
      continue;
    }
    log().note({StepNote::What::trainable, unit->number(),
                static_cast<std::int64_t>(
                    std::hash<std::vector<bool>>()(trainable[u]) >> 1)},
               unit->parameters().leaves().frozen_text());
    if (unit->gradients().accumulating()) {
      unit->gradients().extend_plan(trainable[u], shared_ring_bytes());
      complete = false;  // anew after its slab has been reduced
      continue;
    }
    plan_gradients_of(*unit);
    complete = complete && unit->gradients().plans_only(trainable[u]);
  }
  planned_ = complete;
  planned_trainable_ = std::move(trainable);
}

std::vector<RingUnit> Root::ring_units() const {
  std::vector<RingUnit> seen(units_.size());
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (const auto* unit = units_[u]) {
      seen[u] = {unit->groups().reduce->size(), unit->gradients().wire_bytes(),
                 unit->rows().gathered_bytes(), unit->settings().encloses_units,
                 unit->rows().streams()};
    }
  }
  return seen;
}

std::int64_t Root::gradient_budget() const {
  std::int64_t ranks = 1;
  for (const auto& unit : ring_units()) {
    ranks = std::max(ranks, unit.ranks);
  }
  return gradient_budget_.value_or(default_ring_budget(ranks));
}

std::int64_t Root::shared_ring_bytes() const {
  std::int64_t largest = 0;
  for (const auto& unit : ring_units()) {
    largest = std::max(largest, unit.wire_bytes);
  }
  return ring_bytes(gradient_budget(), largest);
}

void Root::plan_gradients_of(Unit& unit) {
  const auto shared = shared_ring_bytes();
  const auto bytes = ring_bytes_of(ring_units(), last_order_, unit.number(),
                                   gradient_budget(), shared);
  const bool own = bytes > shared;
  unit.gradients().set_own_slots(own);
  constexpr auto kItemsize = static_cast<std::int64_t>(sizeof(float));
  unit.gradients().plan(
      unit.parameters().leaves().trainable(),
      own ? ring_bytes_of_equal_chunks(
                bytes, unit.gradients().wire_bytes(),
                unit.groups().reduce->size(),
                unit.parameters().buffers().slice(0).inner * kItemsize)
          : shared);
}

// A parameter may have been frozen in the last forward, but not in the one
// whose backward begins.
void Root::extend_plans() {
  for (auto* unit : units_) {
    if (unit == nullptr) continue;
    const auto trainable = unit->parameters().leaves().trainable();
    if (!unit->gradients().plans_all(trainable)) {
      require_reducible(*unit, trainable);
      unit->gradients().extend_plan(trainable, shared_ring_bytes());
      planned_ = false;
    }
  }
}

// [Note: Refining the order]
// The first plan expects gradients in reverse registration order.  After the
// first backward that reduces, every rank adopts the order in which rank 0's
// gradients completed: one broadcast, once.  A wrong expectation costs memory
// (a source waits for its turn), never correctness.
void Root::agree_on_order() {
  std::vector<UnitGradients*> remaining;
  for (auto* unit : in_backward_) {
    // The user's hook may reduce over ranks that are not known here.
    if (!unit->gradients().reduction().hook) {
      remaining.push_back(&unit->gradients());
    }
  }
  while (!remaining.empty()) {
    auto& shards = remaining.front()->group();
    const auto& replicas = remaining.front()->reduction().replicas;
    const auto others = std::stable_partition(
        remaining.begin(), remaining.end(), [&](const auto* unit) {
          return &unit->group() == &shards &&
                 unit->reduction().replicas == replicas;
        });
    std::vector<std::int64_t> orders;
    for (auto it = remaining.begin(); it != others; ++it) {
      const auto order = (*it)->observed_order();
      orders.insert(orders.end(), order.begin(), order.end());
    }
    auto agreed = shards.from_rank_zero(std::move(orders), name_);
    if (replicas) {
      agreed = replicas->from_rank_zero(std::move(agreed), name_);
    }
    auto next = agreed.begin();
    for (auto it = remaining.begin(); it != others; ++it) {
      const auto size = static_cast<std::ptrdiff_t>((*it)->size());
      (*it)->expect({next, next + size});
      next += size;
    }
    remaining.erase(remaining.begin(), others);
  }
  order_agreed_ = true;
  planned_ = false;
}

std::vector<Unit*> Root::participants() {
  auto order = schedule_.completion_order();
  if (order.empty()) {
    order = last_order_;
  }
  last_order_ = order;
  std::vector<Unit*> units;
  for (const auto number : order) {
    if (auto* unit = units_[static_cast<std::size_t>(number)]) {
      units.push_back(unit);
    }
  }
  // Those that only an earlier microbatch used reduce what it left, and
  // parameters that the user has gathered may be used without a forward.
  for (auto* unit : units_) {
    if (unit != nullptr &&
        (unit->gradients().accumulating() ||
         unit->parameters().state() == UnitState::unsharded) &&
        std::find(units.begin(), units.end(), unit) == units.end()) {
      units.push_back(unit);
    }
  }
  // What encloses other units is complete only when they all are.
  std::stable_partition(units.begin(), units.end(), [](const Unit* unit) {
    return !unit->settings().encloses_units;
  });
  return units;
}

// --- backward ---------------------------------------------------------------

void Root::open_backward() {
  if (failed_) {
    abort();
  }
  if (backward_ != -1) {
    return;
  }
  require_agreement();
  extend_plans();
  ranks_.note_settings();
  ranks_.note_frozen();
  backward_ = base::current_graph_task();
  graph_kept_ = base::graph_task_keeps_graph();
  LOWTIDE_INVARIANT(backward_ != -1, "autograd runs on this thread");
  in_backward_ = participants();
  std::vector<UnitGradients*> streamed;
  for (auto* unit : in_backward_) {
    unit->begin_backward();
    if (unit->gradients().sync()) {
      streamed.push_back(&unit->gradients());
    }
  }
  stream_.begin(streamed);
  // What is left of a step that raised is dropped before anything else happens.
  base::at_end_of_graph_task(
      [self = shared_from_this()] { self->close_backward(); },
      [root = weak_from_this()] {
        if (const auto alive = root.lock()) {
          alive->failed_ = true;
        }
      });
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
  return std::none_of(units_.begin(), units_.end(), [](const Unit* unit) {
    return unit != nullptr && (unit->in_kept_graph() || !unit->runs_in_order());
  });
}

bool Root::nested_backward() const {
  return base::current_graph_task() != backward_;
}

Unit* Root::enter_backward(Unit& unit, std::int64_t number) {
  const auto call = schedule_.enter_backward(unit.number(), number);
  log().note({StepNote::What::backward, unit.number()});
  if (call.place == std::size_t{0} && !posted_backward_) {
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
                                    unit.used_alike());
  return call.next ? units_[static_cast<std::size_t>(*call.next)] : nullptr;
}

// --- what ranks must have in common ------------------------------------------

void Root::require_agreement() {
  try {
    ranks_.require();
  } catch (...) {
    failed_ = true;
    // Whatever was learned from steps in which ranks differed.
    schedule_ = Schedule(static_cast<std::int32_t>(units_.size()));
    std::iota(last_order_.rbegin(), last_order_.rend(), 0);
    planned_ = false;
    planned_trainable_.clear();
    throw;
  }
}

void Root::reduce_accumulated() {
  if (failed_) {
    abort();
  }
  LOWTIDE_INVARIANT(backward_ == -1 && base::current_graph_task() == -1,
                    "no backward is under way");
  for (auto* unit : units_) {
    if (unit != nullptr) unit->require_split_backward_complete();
  }
  std::vector<UnitGradients*> streamed;
  for (auto* unit : participants()) {
    if (unit->gradients().accumulating()) {
      unit->begin_backward();
      in_backward_.push_back(unit);
      streamed.push_back(&unit->gradients());
    }
  }
  try {
    stream_.begin(streamed);
    close_backward();
  } catch (...) {
    failed_ = true;
    throw;
  }
}

void Root::close_backward() {
  const base::TraceRange trace("lowtide::end_of_backward", name_);
  for (auto* unit : units_) {
    if (unit != nullptr) unit->take_written_gradients();
  }
  stream_.finish();
  // Behind what has left, which some ranks seal later than others.
  if (!posted_backward_) {
    ranks_.ask();
  }
  posted_backward_ = false;
  if (ranks_.compares()) {
    require_agreement();
  }
  if (!order_agreed_ &&
      std::any_of(in_backward_.begin(), in_backward_.end(),
                  [](Unit* unit) { return unit->gradients().sync(); })) {
    agree_on_order();
  }
  open_forwards_ = std::max<std::int64_t>(0, open_forwards_ - 1);
  const bool more_backwards = open_forwards_ > 0;
  for (auto* unit : units_) {
    if (unit != nullptr) {
      unit->end_backward(more_backwards, graph_kept_);
    }
  }
  if (std::exchange(graph_kept_, false)) kept_at_step_ = optimizer_steps_;
  if (!more_backwards) {
    schedule_.end_backward();
  }
  in_backward_.clear();
  backward_ = -1;
}

// --- recovery ---------------------------------------------------------------

void Root::abort(bool drop_gradients) {
  stream_.abort();
  for (auto* unit : units_) {
    if (unit != nullptr) {
      unit->abort(drop_gradients);
    }
  }
  schedule_.abort();
  log().forget();
  posted_backward_ = false;
  in_backward_.clear();
  forward_root_ = nullptr;
  recorded_ = false;
  open_forwards_ = 0;
  backward_ = -1;
  failed_ = false;
}

}  // namespace lowtide::shard
