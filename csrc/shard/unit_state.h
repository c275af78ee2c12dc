// Where a unit's parameters are.  One enum, one transition table.
//
//            gather           arrive            reshard
//   sharded ────────> gathering ───────> unsharded ───────> sharded
//      ^                  ^                  │
//      │                  │ gather           │ seal
//      │     drain        │                  v
//      └──────────────────┴───────────── reducing
//
// `reducing`: the parameters are freed and the unit's gradients are on their
// way to the reduce-scatter.  A unit used again in the same backward gathers
// again from there.  `abort` leads back to `sharded` from everywhere.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "shard/unit_name.h"

namespace lowtide::shard {

enum class UnitState : std::uint8_t { sharded, gathering, unsharded, reducing };
enum class UnitEvent : std::uint8_t {
  gather,   // the all-gather is issued
  arrive,   // compute may read the parameters
  reshard,  // the full parameters are freed
  seal,     // freed by backward; gradients are still in flight
  drain,    // the last gradient has landed
  abort,    // the step failed
};

std::string_view state_name(UnitState state);
std::string_view event_name(UnitEvent event);

// The state after `event`, or nothing where the table has no entry.
std::optional<UnitState> next_state(UnitState state, UnitEvent event);

// A unit's state; throws lowtide::Error naming the unit on an illegal event.
class UnitStateMachine {
 public:
  explicit UnitStateMachine(UnitName unit) : unit_(std::move(unit)) {}

  UnitState state() const { return state_; }
  void on(UnitEvent event);

 private:
  UnitName unit_;
  UnitState state_ = UnitState::sharded;
};

}  // namespace lowtide::shard
