// How the gradients of all units of a root are cut and expected: the same on
// every rank, for what it decides is the order of collectives.
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shard/policy.h"
#include "shard/step_log.h"
#include "shard/units.h"

namespace lowtide::shard {

class GradientPlans {
 public:
  // `units` and `log`, where what is planned is noted, outlive it.
  GradientPlans(std::string root, const Units& units, StepLog& log);

  // Nothing is planned, and units are expected in the reverse order of their
  // registration: they are known only now, or ranks differed.
  void forget();

  // Byte budget of the ring of gradient chunks; takes effect with the next
  // plan.  If never set, it grows with the number of ranks, and the last unit
  // to reduce has a longer ring of its own.
  void set_budget(std::int64_t bytes);
  std::int64_t budget() const;

  // The numbers of units in the order in which their gradients left last; what
  // is empty changes nothing.
  void expect(std::vector<std::int32_t> order);
  const std::vector<std::int32_t>& order() const { return order_; }

  // A recorded forward begins: plans what has changed.
  void plan();
  // A backward begins: adds what parameters' plans lack.
  void extend();
  // The unit's plan is made again, between its backwards.
  void plan_of(Unit& unit);
  // A backward of these units is over: see [Note: Refining the order].
  void refine_order(const Units& units);

 private:
  std::vector<RingUnit> ring_units() const;
  std::int64_t budget_of(const std::vector<RingUnit>& units) const;
  std::int64_t shared_ring_bytes() const;

  std::string root_;
  const Units& units_;
  StepLog& log_;
  std::optional<std::int64_t> budget_;  // as set
  std::vector<std::int32_t> order_;
  std::vector<std::vector<bool>> planned_trainable_;
  bool planned_ = false;
  bool refined_ = false;
};

}  // namespace lowtide::shard
