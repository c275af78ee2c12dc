// Every rank issues the same collectives in the same order over all
// communicators, whatever its own data is.
//
// Random programs: ranks have different numbers of rows, leave different
// parameters unused and complete gradients in another order; all ranks run the
// same units.  Gathers, reductions and sums over replicas meet in one
// Exchange, which throws where two ranks bring different calls, and the bits
// are those of the naive rule.
#include <gtest/gtest.h>

#include <random>

#include "harness.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

// One replica, whose sums take a place in the order of the exchange.
class OrderedReplica final : public comm::Collectives {
 public:
  OrderedReplica(Exchange& exchange, std::int64_t rank,
                 std::shared_ptr<device::ScriptedRuntime> runtime)
      : exchange_(exchange), rank_(rank), alone_(0, 1, std::move(runtime)) {}

  std::int64_t rank() const override { return 0; }
  std::int64_t size() const override { return 1; }
  std::string backend() const override { return alone_.backend(); }
  std::unique_ptr<comm::Pending> all_gather(std::vector<at::Tensor>& outs,
                                            std::vector<at::Tensor>& ins,
                                            const std::string& label) override {
    return alone_.all_gather(outs, ins, label);
  }
  std::unique_ptr<comm::Pending> reduce_scatter(
      at::Tensor& out, at::Tensor& in, comm::Reduction reduction,
      const std::string& label) override {
    return alone_.reduce_scatter(out, in, reduction, label);
  }
  std::unique_ptr<comm::Pending> reduce_scatter_coalesced(
      std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
      comm::Reduction reduction, const std::string& label) override {
    return alone_.reduce_scatter_coalesced(outs, ins, reduction, label);
  }
  std::unique_ptr<comm::Pending> all_to_all(at::Tensor& out, at::Tensor& in,
                                            const std::string& label) override {
    return alone_.all_to_all(out, in, label);
  }
  std::unique_ptr<comm::Pending> all_reduce(at::Tensor& tensor,
                                            comm::Reduction reduction,
                                            const std::string& label) override {
    {
      const device::UnobservedAllocations unobserved;
      exchange_.broadcast(rank_, {0}, base::concat("all-reduce ", label));
    }
    return alone_.all_reduce(tensor, reduction, label);
  }
  std::vector<std::int64_t> from_rank_zero(
      std::vector<std::int64_t> values, const std::string& /*label*/) override {
    return values;
  }

 private:
  Exchange& exchange_;
  std::int64_t rank_;
  comm::RecordingCollectives alone_;
};

constexpr std::size_t kNumLayers = 4;
constexpr std::int64_t kWorldSize = 3;

// What all ranks share, and what differs between them.
struct Call {
  std::size_t unit = 1;
  bool from_input = false;  // a branch whose input needs no gradient
  std::vector<std::vector<std::size_t>> skip;  // by rank
  std::vector<bool> reversed;                  // by rank
};

struct RandomProgram {
  Scenario scenario;
  std::int64_t budget = 1;
  bool replicas = false;
  bool reshard = true;
  // Units 1 and 2, 3 and 4, ...: by themselves, beside each other (see
  // stand_in_pairs), or the first around the second (call_around).
  enum class Pairs : std::uint8_t { none, beside, nested };
  Pairs pairs = Pairs::none;
};

// Like `layer`, the further parameters last first.
Layers::Body layer_in_order(const std::vector<std::size_t>& skip,
                            bool reversed) {
  if (!reversed) return layer(skip);
  return
      [skip](const std::vector<at::Tensor>& parameters, const at::Tensor& x) {
        auto others = skip;
        at::Tensor sum = x;
        for (std::size_t p = parameters.size(); p-- > 2;) {
          if (std::find(skip.begin(), skip.end(), p) == skip.end()) {
            sum = sum + parameters[p].to(x.scalar_type()).sum();
          }
          others.push_back(p);
        }
        return layer(others)(parameters, sum);
      };
}

RandomProgram random_program(std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto pick = [&](std::int64_t count) {
    return static_cast<std::int64_t>(random() %
                                     static_cast<std::uint32_t>(count));
  };
  RandomProgram program;
  auto& units = program.scenario.units;
  units = model_of(kNumLayers, odd_shapes());
  for (auto& unit : units) {
    for (auto& parameter : unit.parameters) parameter.trainable = pick(8) > 0;
  }
  // [Note: Whose numbers decide]: a channel of the unit's own has as many ranks
  // or this one alone, which hears of nobody's gradients.
  program.scenario.compared = pick(2) == 0;
  constexpr std::int64_t kHosts[] = {0, 1, kWorldSize};
  for (auto& unit : units) unit.hosts = kHosts[pick(3)];
  for (const std::size_t outer : {1, 3}) {
    units[outer].hosts = units[outer + 1].hosts;
  }
  std::vector<Call> calls;
  for (std::size_t i = 0; i < kNumLayers + 1; ++i) {
    Call call;
    // Most units once, some again.
    call.unit =
        i < kNumLayers ? i + 1 : 1 + static_cast<std::size_t>(pick(kNumLayers));
    call.from_input = pick(4) == 0;
    for (std::int64_t rank = 0; rank < kWorldSize; ++rank) {
      std::vector<std::size_t> skip;
      for (std::size_t p = 0; p < units[call.unit].parameters.size(); ++p) {
        const bool left_out = pick(4) == 0;
        if (left_out && units[call.unit].hosts != 1) skip.push_back(p);
      }
      call.skip.push_back(std::move(skip));
      call.reversed.push_back(pick(3) == 0);
    }
    calls.push_back(std::move(call));
  }
  if (pick(2) == 0) std::shuffle(calls.begin(), calls.end(), random);
  std::vector<std::int64_t> repeats;
  for (std::int64_t rank = 0; rank < kWorldSize; ++rank) {
    constexpr std::int64_t kRepeats[] = {1, 100, 1000, 5000};
    repeats.push_back(kRepeats[pick(4)]);
  }
  using Pairs = RandomProgram::Pairs;
  constexpr Pairs kPairs[] = {Pairs::beside, Pairs::none, Pairs::nested};
  program.pairs = kPairs[pick(3)];
  for (const std::size_t outer : {1, 3}) {
    units[outer].encloses_units = program.pairs == Pairs::nested;
  }
  program.scenario.program = [calls, repeats, pairs = program.pairs](
                                 Layers& layers, const at::Tensor& x) {
    const auto rank = static_cast<std::size_t>(layers.rank());
    const at::Tensor rows = x.repeat({repeats[rank], 1});
    return layers.call(0, rows, [&](const auto& parameters, const auto& input) {
      at::Tensor y = input.detach().set_requires_grad(true);
      for (const Call& call : calls) {
        const auto body = layer_in_order(call.skip[rank], call.reversed[rank]);
        const auto run = [&](const at::Tensor& in) {
          if (pairs == Pairs::beside) {
            return call_pair(layers, call.unit, in, body);
          }
          if (pairs == Pairs::nested && call.unit % 2 == 1) {
            return call_around(layers, call.unit, in, body);
          }
          return layers.call(call.unit, in, body);
        };
        y = call.from_input ? y + run(input.detach()) : run(y);
      }
      return layer()(parameters, y);
    });
  };
  const std::vector<std::vector<bool>> syncs = {
      {true}, {true, true}, {false, true}, {false, false, true, true}};
  program.scenario.sync = syncs[static_cast<std::size_t>(pick(4))];
  constexpr std::int64_t kBudgets[] = {1, 4096, 64 << 20};
  program.budget = kBudgets[pick(3)];
  program.replicas = pick(3) == 0;
  program.reshard = pick(4) > 0;
  if (pick(2) == 0) {  // one slot
    program.scenario = with_bystander(std::move(program.scenario));
  }
  return program;
}

class CallOrderTest : public testing::TestWithParam<std::uint32_t> {};

TEST_P(CallOrderTest, IsTheSameOnRanksWithDifferentData) {
  for (std::uint32_t seed = 8 * GetParam(); seed < 8 * GetParam() + 8; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const RandomProgram program = random_program(seed);
    const auto expected = train_naively(program.scenario, kWorldSize);
    EXPECT_NO_THROW(
        run_ranks(kWorldSize, [&](Exchange& exchange, std::int64_t r) {
          Rank rank(exchange, r, program.scenario.units, /*offloaded=*/false,
                    program.scenario.compared);
          rank.root->set_gradient_budget(program.budget);
          for (std::size_t u = 0; u < rank.size(); ++u) {
            rank.unit(u).settings().reshard_after_forward = program.reshard;
            if (program.pairs == RandomProgram::Pairs::beside) {
              stand_in_pairs(rank);
            }
            if (program.replicas) {
              rank.unit(u).settings().reduction.replicas =
                  std::make_shared<OrderedReplica>(exchange, r, rank.runtime);
            }
          }
          for (int step = 0; step < program.scenario.num_steps; ++step) {
            run_step(rank, program.scenario, step);
            EXPECT_EQ(rank.gradient_difference(expected[step].gradients), "")
                << "step " << step;
            rank.optimize();
            rank.zero_grad();
          }
          EXPECT_TRUE(rank.runtime->violations().empty());
        }));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, CallOrderTest, testing::Range(0u, 6u));

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
