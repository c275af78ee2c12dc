// What the runtime's log says of a step: names as they stand there.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "harness.h"
#include "ranks.h"

namespace lowtide::shard {

using device::EntryId;

// The log of one step of a rank.
class Step {
 public:
  // Of entries that were made after `from`.
  Step(device::ScriptedRuntime& runtime, std::size_t from)
      : runtime_(runtime), from_(from) {}

  std::vector<EntryId> all(const std::string& name,
                           std::optional<device::Stream> stream = {}) const {
    const auto log = runtime_.log();
    std::vector<EntryId> found;
    for (const EntryId id : runtime_.entries(name)) {
      const bool fits = stream ? log[id].stream == *stream
                               : log[id].kind == device::Entry::Kind::mark;
      if (id >= from_ && fits) found.push_back(id);
    }
    return found;
  }
  // A kernel, or the start of a collective on the wire.
  EntryId at(const std::string& name, std::size_t nth = 0) const {
    return all(name).at(nth);
  }
  bool leads(EntryId first, EntryId second) const {
    return runtime_.happens_before(first, second);
  }

 private:
  device::ScriptedRuntime& runtime_;
  std::size_t from_;
};

// Runs two steps on two ranks and shows each to `check`.
inline void for_each_step(const Scenario& scenario,
                          const std::function<void(const Step&)>& check,
                          const std::function<void(Rank&)>& prepare = {}) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units, scenario.offloaded,
              scenario.compared);
    if (prepare) prepare(rank);
    for (int step = 0; step < scenario.num_steps; ++step) {
      SCOPED_TRACE(base::concat("rank ", r, ", step ", step));
      const std::size_t from = rank.runtime->log().size();
      run_step(rank, scenario, step);
      check(Step(*rank.runtime, from));
      rank.optimize();
      rank.zero_grad();
    }
    EXPECT_THAT(rank.runtime->violations(), testing::IsEmpty());
  });
}

// The order of names in the log, without what is not listed.
inline std::vector<std::string> order_of(
    const Step& step, const std::vector<std::string>& names) {
  std::map<EntryId, std::string> by_entry;
  for (const std::string& name : names) {
    for (const EntryId id : step.all(name)) by_entry[id] = name;
  }
  std::vector<std::string> order;
  for (const auto& [id, name] : by_entry) order.push_back(name);
  return order;
}

}  // namespace lowtide::shard
