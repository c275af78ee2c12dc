// Units whose shards and gradients are on the host: the bits of those on the
// device, what is copied beside what, and what stays on the device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/check.h"
#include "harness.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using device::Entry;
using device::EntryId;
using device::Stream;
using memory::Category;
using testing::IsEmpty;

constexpr std::size_t kLayers = 6;

Scenario offloaded(std::vector<bool> sync = {true}) {
  return {.units = with_dtypes(model_of(kLayers, odd_shapes()), at::kFloat,
                               at::kBFloat16, at::kFloat),
          .program = chain(kLayers),
          .sync = std::move(sync),
          .num_steps = 3,
          .offloaded = true};
}

TEST(OffloadTest, HasTheBitsOfTheDevice) {
  for (const std::int64_t world_size : {1, 2, 3}) {
    for (const auto& sync : {std::vector<bool>{true},
                             {true, true},
                             {false, true},
                             {true, false, true}}) {
      for (const std::int64_t budget : {1, 64 << 20}) {
        expect_naive_bits(offloaded(sync), world_size, [&](Rank& rank) {
          rank.root->set_gradient_budget(budget);
        });
      }
    }
  }
}

TEST(OffloadTest, HasThemWithoutACastAndWithSeveralDtypes) {
  Scenario scenario = offloaded({true, true});
  scenario.units = model_of(kLayers, odd_shapes());
  expect_naive_bits(scenario, 2);
  scenario.units[1].parameters[0].storage = at::kBFloat16;
  scenario.units[1].parameters[0].compute = at::kBFloat16;
  scenario.units[2].parameters[1].trainable = false;
  scenario.sync = {false, true};
  expect_naive_bits(scenario, 2);
}

// Entries of a step's log.
class Step {
 public:
  Step(Rank& rank, std::size_t from)
      : runtime_(*rank.runtime), log_(rank.runtime->log()), from_(from) {}

  EntryId kernel(const std::string& name) const {
    for (const EntryId id : runtime_.entries(name)) {
      if (id >= from_ && log_[id].kind == Entry::Kind::mark) return id;
    }
    throw Error(name);
  }
  // Accesses and waits of the host, oldest first.
  std::vector<EntryId> all(Stream stream, Entry::Kind kind) const {
    std::vector<EntryId> found;
    for (EntryId id = from_; id < log_.size(); ++id) {
      if (log_[id].stream == stream && log_[id].kind == kind) {
        found.push_back(id);
      }
    }
    return found;
  }
  bool leads(EntryId first, EntryId second) const {
    return runtime_.happens_before(first, second);
  }

 private:
  device::ScriptedRuntime& runtime_;
  std::vector<Entry> log_;
  std::size_t from_;
};

void in_last_step(const std::function<void(Rank&, const Step&)>& check) {
  const Scenario scenario = offloaded();
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units, /*offloaded=*/true);
    for (int step = 0; step < scenario.num_steps; ++step) {
      const std::size_t from = rank.runtime->log().size();
      rank.ledger->reset_peaks();
      run_step(rank, scenario, step);
      if (step + 1 == scenario.num_steps) check(rank, Step(rank, from));
      rank.optimize();
      rank.zero_grad();
    }
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

TEST(OffloadTest, TheNextUnitIsCopiedBesideTheOneThatRuns) {
  in_last_step([](Rank&, const Step& step) {
    const auto copies = step.all(Stream::reload, Entry::Kind::read);
    // Of the model and its layers, twice.
    ASSERT_EQ(copies.size(), 2 * (1 + kLayers));
    for (std::size_t i = 0; i + 1 < kLayers; ++i) {
      const auto copy = copies[2 + i];  // of layer i + 1
      EXPECT_FALSE(
          step.leads(step.kernel(base::concat("forward layers.", i)), copy))
          << i;
      EXPECT_TRUE(
          step.leads(copy, step.kernel(base::concat("forward layers.", i + 1))))
          << i;
    }
    for (std::size_t i = 0; i + 1 < kLayers; ++i) {
      const auto copy = copies[1 + 2 * kLayers - i];  // of layer i
      EXPECT_FALSE(step.leads(
          step.kernel(base::concat("backward layers.", i + 1)), copy))
          << i;
      EXPECT_TRUE(
          step.leads(copy, step.kernel(base::concat("backward layers.", i))))
          << i;
    }
  });
}

TEST(OffloadTest, TheHostWaitsBehindForwardAndBackwardAlone) {
  in_last_step([](Rank&, const Step& step) {
    std::vector<EntryId> waits;
    for (const Stream stream : {Stream::compute, Stream::gather, Stream::reduce,
                                Stream::offload, Stream::reload}) {
      const auto more = step.all(stream, Entry::Kind::synchronize);
      waits.insert(waits.end(), more.begin(), more.end());
    }
    const auto between = [&](const std::string& first,
                             const std::string& last) {
      return std::count_if(waits.begin(), waits.end(), [&](EntryId id) {
        return step.kernel(first) < id && id < step.kernel(last);
      });
    };
    const std::string end = base::concat("layers.", kLayers - 1);
    EXPECT_EQ(between("forward model", "forward " + end), 0);
    EXPECT_EQ(between("backward model", "backward layers.0"), 0);
    EXPECT_EQ(waits.size(), 3u);  // for parameters twice, for gradients once
  });
}

// The host is none of the streams: one that no event orders behind a copy
// stands for it.  What it breaks where its wait number `skipped` is missing.
std::vector<std::string> broken_without(int skipped) {
  std::vector<std::string> broken;
  const Scenario scenario = offloaded();
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units, /*offloaded=*/true);
    rank.waits->skip_synchronize(skipped);
    const auto shard = rank.shard(kLayers, 0);
    const auto loss =
        loss_of(scenario.program(rank, input_of(scenario, r, 0, 0)));
    rank.runtime->touches(Stream::offload, shard.const_data_ptr(),
                          shard.nbytes(), device::Access::write);
    rank.runtime->synchronize(Stream::offload);  // what the host did is over
    loss.backward();
    const auto& gradient = rank.shard(1, 0).grad();
    rank.runtime->touches(Stream::wire, gradient.const_data_ptr(),
                          gradient.nbytes(), device::Access::read);
    rank.zero_grad();
    broken = rank.runtime->violations();
  });
  return broken;
}

TEST(OffloadTest, TheHostMayWriteBehindAForwardAndReadBehindABackward) {
  EXPECT_THAT(broken_without(-1), IsEmpty());
  EXPECT_THAT(broken_without(0), testing::Not(IsEmpty()));
  EXPECT_THAT(broken_without(1), testing::Not(IsEmpty()));
}

TEST(OffloadTest, GradientsOfFewUnitsAreOnTheDeviceAtOnce) {
  in_last_step([](Rank& rank, const Step& step) {
    const auto bytes_of = [&](std::size_t u) {
      auto& gradients = rank.unit(u).gradients();
      return gradients.sharded().generation_bytes(gradients.trainable());
    };
    const auto largest = bytes_of(1);  // all layers are equal
    EXPECT_EQ(rank.peak(Category::parameters), 0);
    EXPECT_LE(rank.peak(Category::sharded_gradients),
              bytes_of(0) + 3 * largest);
    EXPECT_EQ(rank.live(Category::sharded_gradients), 0);
    const auto on_host = rank.pool->ledger()->live();
    EXPECT_GT(on_host[static_cast<std::size_t>(Category::parameters)], 0);
    EXPECT_GT(on_host[static_cast<std::size_t>(Category::sharded_gradients)],
              3 * largest);
    // Slots of the first step serve every step.
    EXPECT_EQ(rank.pool->figures().num_registrations,
              static_cast<std::int64_t>(2 * rank.size()));
    EXPECT_EQ(step.all(Stream::offload, Entry::Kind::write).size(),
              rank.size());
  });
}

TEST(OffloadTest, AStepThatFailsLeavesNothingBehind) {
  const Scenario scenario = offloaded();
  const auto expected = train_naively(scenario, 2);
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units, /*offloaded=*/true);
    rank.on_kernel = [&](const std::string& name) {
      if (name == "backward layers.0") {
        rank.on_kernel = nullptr;
        throw Error("thrown by a kernel");
      }
    };
    EXPECT_THROW(run_step(rank, scenario, 0), Error);
    for (int step = 0; step < scenario.num_steps; ++step) {
      run_step(rank, scenario, step);
      EXPECT_EQ(rank.gradient_difference(expected[step].gradients), "");
      rank.optimize();
      rank.zero_grad();
      EXPECT_EQ(rank.parameter_difference(expected[step].parameters), "");
    }
    EXPECT_EQ(rank.unrest(), "");
    EXPECT_EQ(rank.live(Category::sharded_gradients), 0);
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
