#include "shard/gradient_plans.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "shard/unit.h"

namespace lowtide::shard {
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

GradientPlans::GradientPlans(std::string root, const Units& units, StepLog& log)
    : root_(std::move(root)), units_(units), log_(log) {}

void GradientPlans::forget() {
  order_.resize(units_.size());
  std::iota(order_.rbegin(), order_.rend(), 0);
  planned_ = false;
  planned_trainable_.clear();
}

void GradientPlans::expect(std::vector<std::int32_t> order) {
  if (!order.empty()) order_ = std::move(order);
}

void GradientPlans::set_budget(std::int64_t bytes) {
  if (bytes <= 0) {
    throw InvalidArgument(base::error_text(
        base::concat("gradient budget of '", root_, "'"),
        "a positive number of bytes", base::concat(bytes),
        base::concat("The default for its units is ",
                     default_ring_budget(ring_units()), " bytes.")));
  }
  budget_ = bytes;
  planned_ = false;
}

// The plan depends on which parameters are trainable and on the budget: both
// change only between forwards, on all ranks alike.
void GradientPlans::plan() {
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
  log_.note({StepNote::What::settings, -1, budget()},
            base::concat("a gradient budget of ", budget(), " bytes"));
  for (std::size_t u = 0; u < units_.size(); ++u) {
    auto* unit = units_[u];
    if (unit == nullptr ||
        (planned_ && trainable[u] == planned_trainable_[u])) {
      continue;
    }
    log_.note({StepNote::What::trainable, unit->number(),
               static_cast<std::int64_t>(
                   std::hash<std::vector<bool>>()(trainable[u]) >> 1)},
              unit->parameters().leaves().frozen_text());
    if (unit->gradients().accumulating()) {
      unit->gradients().extend_plan(trainable[u], shared_ring_bytes());
      complete = false;  // anew after its slab has been reduced
      continue;
    }
    plan_of(*unit);
    complete = complete && unit->gradients().plans_only(trainable[u]);
  }
  planned_ = complete;
  planned_trainable_ = std::move(trainable);
}

std::vector<RingUnit> GradientPlans::ring_units() const {
  std::vector<RingUnit> seen(units_.size());
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (const auto* unit = units_[u]) {
      seen[u] = {unit->groups().reduce->size(), unit->gradients().wire_bytes(),
                 unit->rows().gathered_bytes(), unit->outermost(),
                 unit->rows().streams(),        unit->gradients().of_experts()};
    }
  }
  return seen;
}

std::int64_t GradientPlans::budget_of(
    const std::vector<RingUnit>& units) const {
  return budget_.value_or(default_ring_budget(units));
}

std::int64_t GradientPlans::budget() const { return budget_of(ring_units()); }

std::int64_t GradientPlans::shared_ring_bytes() const {
  const auto units = ring_units();
  return ring_bytes(units, budget_of(units));
}

void GradientPlans::plan_of(Unit& unit) {
  auto& gradients = unit.gradients();
  const auto units = ring_units();
  const auto budget = budget_of(units);
  const auto shared = ring_bytes(units, budget);
  const auto bytes =
      ring_bytes_of(units, order_, unit.number(), budget, shared);
  const auto ranks = unit.groups().reduce->size();
  const bool own = bytes > shared;
  gradients.set_slots(own ? own_ring_slots(ranks) : ring_slots(units, shared),
                      own);
  constexpr auto kItemsize = static_cast<std::int64_t>(sizeof(float));
  gradients.plan(
      unit.parameters().leaves().trainable(),
      own ? ring_bytes_of_equal_chunks(
                bytes, gradients.wire_bytes(), ranks,
                unit.parameters().buffers().slice(0).inner * kItemsize)
          : shared);
}

// A parameter may have been frozen in the last forward, but not in the one
// whose backward begins.
void GradientPlans::extend() {
  for (auto* unit : living(units_)) {
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
void GradientPlans::refine_order(const Units& units) {
  if (refined_ || std::none_of(units.begin(), units.end(), [](auto* unit) {
        return unit->gradients().sync();
      })) {
    return;
  }
  std::vector<UnitGradients*> remaining;
  for (auto* unit : units) {
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
    auto agreed = shards.from_rank_zero(std::move(orders), root_);
    if (replicas) {
      agreed = replicas->from_rank_zero(std::move(agreed), root_);
    }
    auto next = agreed.begin();
    for (auto it = remaining.begin(); it != others; ++it) {
      const auto size = static_cast<std::ptrdiff_t>((*it)->size());
      (*it)->expect({next, next + size});
      next += size;
    }
    remaining.erase(remaining.begin(), others);
  }
  refined_ = true;
  planned_ = false;
}

}  // namespace lowtide::shard
