#include "shard/unit_state.h"

#include "base/check.h"

namespace lowtide::shard {

std::string_view state_name(UnitState state) {
  switch (state) {
    case UnitState::sharded:
      return "sharded";
    case UnitState::gathering:
      return "gathering";
    case UnitState::unsharded:
      return "unsharded";
    case UnitState::reducing:
      return "reducing";
  }
  return "?";
}

std::string_view event_name(UnitEvent event) {
  switch (event) {
    case UnitEvent::gather:
      return "gather";
    case UnitEvent::arrive:
      return "arrive";
    case UnitEvent::reshard:
      return "reshard";
    case UnitEvent::seal:
      return "seal";
    case UnitEvent::drain:
      return "drain";
    case UnitEvent::abort:
      return "abort";
  }
  return "?";
}

std::optional<UnitState> next_state(UnitState state, UnitEvent event) {
  using S = UnitState;
  using E = UnitEvent;
  if (event == E::abort) {
    return S::sharded;
  }
  switch (state) {
    case S::sharded:
      if (event == E::gather) return S::gathering;
      if (event == E::seal) return S::reducing;  // parameters never needed
      break;
    case S::gathering:
      if (event == E::arrive) return S::unsharded;
      break;
    case S::unsharded:
      if (event == E::reshard) return S::sharded;
      if (event == E::seal) return S::reducing;
      break;
    case S::reducing:
      if (event == E::gather) return S::gathering;
      if (event == E::drain) return S::sharded;
      break;
  }
  return std::nullopt;
}

void UnitStateMachine::on(UnitEvent event) {
  const auto next = next_state(state_, event);
  if (!next) {
    throw Error(base::error_text(
        base::concat("unit '", *unit_, "'"),
        base::concat("a state that allows '", event_name(event), "'"),
        base::concat("'", state_name(state_), "'"),
        "Call lowtide.abort_step(model) to return every unit to a clean "
        "state; if no exception came before this, please report it."));
  }
  state_ = *next;
}

}  // namespace lowtide::shard
