#include "shard/unit_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/check.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::StrEq;
using testing::ThrowsMessage;

using S = UnitState;
using E = UnitEvent;

constexpr S kStates[] = {S::sharded, S::gathering, S::unsharded, S::reducing};
constexpr E kEvents[] = {E::gather, E::arrive, E::reshard,
                         E::seal,   E::drain,  E::abort};

UnitName name() { return std::make_shared<const std::string>("layers.3"); }

// A machine that legal events brought to `state`.
UnitStateMachine machine_in(S state) {
  UnitStateMachine machine(name());
  switch (state) {
    case S::sharded:
      break;
    case S::gathering:
      machine.on(E::gather);
      break;
    case S::unsharded:
      machine.on(E::gather);
      machine.on(E::arrive);
      break;
    case S::reducing:
      machine.on(E::gather);
      machine.on(E::arrive);
      machine.on(E::seal);
      break;
  }
  EXPECT_EQ(machine.state(), state);
  return machine;
}

TEST(UnitStateTest, TheTableHoldsForEveryStateAndEvent) {
  const std::map<std::pair<S, E>, S> table = {
      {{S::sharded, E::gather}, S::gathering},
      {{S::sharded, E::seal}, S::reducing},
      {{S::sharded, E::abort}, S::sharded},
      {{S::gathering, E::arrive}, S::unsharded},
      {{S::gathering, E::abort}, S::sharded},
      {{S::unsharded, E::reshard}, S::sharded},
      {{S::unsharded, E::seal}, S::reducing},
      {{S::unsharded, E::abort}, S::sharded},
      {{S::reducing, E::gather}, S::gathering},
      {{S::reducing, E::drain}, S::sharded},
      {{S::reducing, E::abort}, S::sharded},
  };
  for (const S state : kStates) {
    for (const E event : kEvents) {
      SCOPED_TRACE(base::concat(state_name(state), ", ", event_name(event)));
      const auto entry = table.find({state, event});
      UnitStateMachine machine = machine_in(state);
      if (entry == table.end()) {
        EXPECT_EQ(next_state(state, event), std::nullopt);
        EXPECT_THROW(machine.on(event), Error);
        EXPECT_EQ(machine.state(), state);
      } else {
        EXPECT_EQ(next_state(state, event), entry->second);
        machine.on(event);
        EXPECT_EQ(machine.state(), entry->second);
      }
    }
  }
}

TEST(UnitStateTest, NamesDiffer) {
  std::map<std::string_view, int> names;
  for (const S state : kStates) ++names[state_name(state)];
  for (const E event : kEvents) ++names[event_name(event)];
  EXPECT_EQ(names.size(), std::size(kStates) + std::size(kEvents));
}

TEST(UnitStateTest, AnIllegalEventNamesUnitEventAndState) {
  UnitStateMachine machine = machine_in(S::gathering);
  EXPECT_THAT(
      [&] { machine.on(E::seal); },
      ThrowsMessage<Error>(StrEq(
          "lowtide: unit 'layers.3': expected a state that allows 'seal', got "
          "'gathering'. Call lowtide.abort_step(model) to return every unit to "
          "a clean state; if no exception came before this, please report "
          "it.")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
