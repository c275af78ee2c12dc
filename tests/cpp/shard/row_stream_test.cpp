// A head whose rows are read and whose gradient leaves block by block.  All
// values are small integers, so sums are exact in any order.
#include "shard/row_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/check.h"
#include "harness.h"
#include "shard/policy.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using device::Access;
using device::EntryId;
using device::Stream;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

constexpr std::int64_t kVocabulary = 301;  // divides by none of 2, 3, 4
constexpr std::int64_t kModel = 0;
constexpr std::size_t kHead = 1;

std::vector<UnitSpec> model_with_head(at::ScalarType compute = at::kFloat,
                                      bool trainable = true) {
  return with_dtypes(
      {{"model", {{{kWidth}}}, /*encloses_units=*/true},
       {"head", {{.sizes = {kVocabulary, kWidth}, .trainable = trainable}}}},
      at::kFloat, compute, at::kFloat);
}

Parameters small_integers(const std::vector<UnitSpec>& units) {
  Parameters parameters = initial_parameters(units);
  for (auto& unit : parameters) {
    for (auto& parameter : unit) {
      parameter = (parameter * 3).round().clamp(-3, 3);
    }
  }
  return parameters;
}

at::Tensor tokens(std::int64_t rank, at::ScalarType dtype) {
  return (at::arange(4 * kWidth) + rank)
      .remainder(5)
      .sub(2)
      .view({4, kWidth})
      .to(dtype);
}

// sum over v of (h . W[v])^2 / 2, and what it leaves for backward.
struct SquaredLogits : torch::autograd::Function<SquaredLogits> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& h, Rank* rank) {
    context->save_for_backward({h});
    context->saved_data["rank"] = reinterpret_cast<std::int64_t>(rank);
    at::Tensor sum = at::zeros({h.size(0)}, at::kFloat);
    RowStream& stream = rank->unit(kHead).rows().read(RowReads::blocks);
    stream.begin(RowPass::recorded);
    for (std::int64_t k = 0; k < stream.num_blocks(); ++k) {
      const auto rows = read(*rank, stream, k, "forward");
      sum += h.mm(rows.t()).to(at::kFloat).square().sum(1) / 2;
    }
    stream.end();
    return sum;
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    auto& rank = *reinterpret_cast<Rank*>(context->saved_data["rank"].toInt());
    RowStream& stream = rank.unit(kHead).rows().read(RowReads::blocks);
    const auto h = context->get_saved_variables()[0];
    auto dh = at::zeros_like(h);
    stream.begin(RowPass::backward);
    for (std::int64_t k = 0; k < stream.num_blocks(); ++k) {
      const auto rows = read(rank, stream, k, "backward");
      const auto logits =
          h.mm(rows.t()).mul(gradients[0].to(h.scalar_type()).unsqueeze(1));
      dh += logits.mm(rows);
      auto gradient = logits.t().mm(h).contiguous();
      rank.runtime->touches(Stream::compute, gradient.const_data_ptr(),
                            gradient.nbytes(), Access::write);
      stream.put(k, std::move(gradient));
    }
    stream.end();
    return {dh, {}};
  }

  static at::Tensor read(Rank& rank, RowStream& stream, std::int64_t k,
                         const std::string& pass) {
    auto rows = stream.fetch(k);
    rank.runtime->mark(Stream::compute, base::concat(pass, " block ", k));
    rank.runtime->touches(Stream::compute, rows.const_data_ptr(), rows.nbytes(),
                          Access::read);
    return rows;
  }
};

// One microbatch; h = x * scale inside the root's forward.
at::Tensor run_microbatch(Rank& rank, at::ScalarType dtype) {
  const Layers::Body body = [&](const std::vector<at::Tensor>& parameters,
                                const at::Tensor& x) {
    return SquaredLogits::apply(x * parameters[0], &rank);
  };
  auto loss = rank.call(kModel, tokens(rank.rank(), dtype), body).sum();
  loss.backward();
  return loss.detach();
}

struct Dense {
  at::Tensor scale;
  at::Tensor head;
};

// The average over ranks of the sum over microbatches.
Dense dense_gradients(const Parameters& full, std::int64_t world_size,
                      int microbatches, at::ScalarType dtype) {
  Dense sum{at::zeros({kWidth}), at::zeros({kVocabulary, kWidth})};
  for (std::int64_t r = 0; r < world_size; ++r) {
    const auto scale = full[0][0].detach().clone().set_requires_grad(true);
    const auto head = full[1][0].detach().clone().set_requires_grad(true);
    const auto h = tokens(r, dtype).to(at::kFloat) * scale;
    (h.mm(head.t()).square().sum() / 2).backward();
    sum.scale += scale.grad() * microbatches;
    sum.head += head.grad() * microbatches;
  }
  return {sum.scale / world_size, sum.head / world_size};
}

TEST(RowStreamTest, FetchesEveryRowOnceInBlocksOfAllShards) {
  for (const bool offloaded : {false, true}) {
    for (const std::int64_t world_size : {1, 2, 3, 4}) {
      run_ranks(world_size, [&](Exchange& exchange, std::int64_t r) {
        const auto units = model_with_head();
        Rank rank(exchange, r, units, offloaded);
        const auto full = small_integers(units);
        rank.load(full);
        rank.root->set_gradient_budget(1);  // the smallest chunks: 128 columns
        RowStream& stream = rank.unit(kHead).rows().read(RowReads::blocks);
        EXPECT_EQ(stream.block_rows(), 128 / kWidth);
        EXPECT_EQ(stream.padded_rows(),
                  (kVocabulary + world_size - 1) / world_size);
        std::vector<std::int64_t> seen(kVocabulary, 0);
        stream.begin(RowPass::forward);
        for (std::int64_t k = 0; k < stream.num_blocks(); ++k) {
          const auto rows = stream.fetch(k);
          ASSERT_EQ(rows.size(0), world_size * stream.rows_in(k));
          for (std::int64_t i = 0; i < rows.size(0); ++i) {
            const auto owner = i / stream.rows_in(k);
            const auto row = owner * stream.padded_rows() +
                             k * stream.block_rows() + i % stream.rows_in(k);
            if (row >= kVocabulary) continue;
            ++seen[static_cast<std::size_t>(row)];
            EXPECT_TRUE(same_bits(rows[i], full[kHead][0][row])) << row;
          }
        }
        stream.end();
        EXPECT_EQ(seen, std::vector<std::int64_t>(kVocabulary, 1));
        EXPECT_EQ(rank.live(memory::Category::gathered), 0);
      });
    }
  }
}

TEST(RowStreamTest, GradientsEqualTheDenseOnes) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool offloaded : {false, true}) {
      for (const std::int64_t world_size : {1, 2, 3, 4}) {
        for (const bool sync_each : {true, false}) {
          run_ranks(world_size, [&](Exchange& exchange, std::int64_t r) {
            const auto units = model_with_head(dtype);
            Rank rank(exchange, r, units, offloaded);
            const auto full = small_integers(units);
            rank.load(full);
            rank.root->set_gradient_budget(1);
            rank.unit(kHead).rows().read(RowReads::blocks);
            for (int step = 0; step < 2; ++step) {
              SCOPED_TRACE(base::concat("rank ", r, " of ", world_size,
                                        ", step ", step, ", sync each ",
                                        sync_each));
              rank.set_sync(sync_each);
              run_microbatch(rank, dtype);
              rank.set_sync(true);
              run_microbatch(rank, dtype);
              // fp32 has room for every integer here, bf16 for none of the
              // sums: there only shape and bytes are compared.
              if (dtype == at::kFloat) {
                const auto dense = dense_gradients(full, world_size, 2, dtype);
                EXPECT_EQ(
                    rank.gradient_difference({{dense.scale}, {dense.head}}),
                    "");
              } else {
                EXPECT_TRUE(rank.shard(kHead, 0).grad().defined());
              }
              rank.zero_grad();
              EXPECT_EQ(rank.unrest(), "");
            }
            EXPECT_THAT(rank.runtime->violations(), IsEmpty());
          });
        }
      }
    }
  }
}

TEST(RowStreamTest, HoldsTwoBlocksAndTheRing) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    const auto units = model_with_head(at::kBFloat16);
    Rank rank(exchange, r, units);
    rank.root->set_gradient_budget(1);
    const RowStream& stream = rank.unit(kHead).rows().read(RowReads::blocks);
    run_microbatch(rank, at::kBFloat16);
    const auto block = 2 * stream.block_rows() * kWidth * 2;  // N rows bf16
    EXPECT_GT(stream.num_blocks(), 3);
    EXPECT_EQ(rank.unit(kHead).rows().gathered_bytes(), 2 * block);
    EXPECT_EQ(rank.unit(kHead).rows().input_bytes(), block);
    const auto scale = rank.unit(kModel).rows().gathered_bytes();
    EXPECT_EQ(rank.peak(memory::Category::gathered), 2 * block + scale);
    EXPECT_EQ(rank.peak(memory::Category::gradient_stream),
              kRingSlots * rank.unit(kHead).gradients().slot_bytes());
  });
}

// An embedding's forward: larger blocks than its gradient's, every row in one.
TEST(RowStreamTest, ALookupReadsEveryRowOnceInItsOwnBlocks) {
  constexpr std::int64_t kRows = 40;
  for (const bool offloaded : {false, true}) {
    for (const std::int64_t world_size : {1, 2, 3, 4}) {
      run_ranks(world_size, [&](Exchange& exchange, std::int64_t r) {
        const auto units = model_with_head(at::kBFloat16);
        Rank rank(exchange, r, units, offloaded);
        const auto full = small_integers(units);
        rank.load(full);
        rank.root->set_gradient_budget(1);
        auto& unit = rank.unit(kHead);
        RowStream& stream = unit.rows().read(RowReads::lookup, kRows);
        EXPECT_TRUE(unit.rows().looks_up());
        EXPECT_EQ(stream.lookup_rows(), kRows);
        EXPECT_LT(stream.block_rows(), kRows);
        std::vector<std::int64_t> seen(kVocabulary, 0);
        stream.begin(RowPass::lookup);
        for (std::int64_t begin = 0; begin < stream.padded_rows();
             begin += kRows) {
          const auto count = std::min(kRows, stream.padded_rows() - begin);
          const auto rows =
              SquaredLogits::read(rank, stream, begin / kRows, "");
          ASSERT_EQ(rows.size(0), world_size * count);
          for (std::int64_t i = 0; i < rows.size(0); ++i) {
            const auto row =
                i / count * stream.padded_rows() + begin + i % count;
            if (row >= kVocabulary) continue;
            ++seen[static_cast<std::size_t>(row)];
            EXPECT_TRUE(same_bits(rows[i].to(at::kFloat), full[kHead][0][row]))
                << row;
          }
        }
        stream.end();
        EXPECT_EQ(seen, std::vector<std::int64_t>(kVocabulary, 1));
        EXPECT_EQ(rank.live(memory::Category::gathered), 0);
        EXPECT_EQ(rank.peak(memory::Category::gathered),
                  unit.rows().gathered_bytes());
        EXPECT_EQ(unit.rows().gathered_bytes(),
                  world_size * std::min(2 * kRows, stream.padded_rows()) *
                      kWidth * 2);
        EXPECT_THAT(rank.runtime->violations(), IsEmpty());
      });
    }
  }
}

// What stays gathered until backward is read there, not looked up.
TEST(RowStreamTest, ATableThatStaysGatheredIsNotLookedUp) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, model_with_head());
    auto& unit = rank.unit(kHead);
    unit.rows().read(RowReads::lookup, 40);
    unit.settings().reshard_after_forward = false;
    EXPECT_FALSE(unit.rows().looks_up());
    EXPECT_EQ(unit.rows().gathered_bytes(),
              unit.parameters().buffers().gathered_bytes());
    unit.settings().reshard_after_forward = true;
    unit.unshard();
    EXPECT_FALSE(unit.rows().looks_up());
    unit.reshard();
    EXPECT_TRUE(unit.rows().looks_up());
  });
}

TEST(RowStreamTest, TheNextGatherDoesNotWaitForTheKernelsOfABlock) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    const auto units = model_with_head();
    Rank rank(exchange, r, units);
    rank.root->set_gradient_budget(1);
    const RowStream& stream = rank.unit(kHead).rows().read(RowReads::blocks);
    run_microbatch(rank, at::kFloat);
    const auto log = rank.runtime->log();
    std::vector<EntryId> gathers;
    for (const auto id : rank.runtime->entries("all-gather head")) {
      if (log[id].kind == device::Entry::Kind::mark) gathers.push_back(id);
    }
    const auto blocks = static_cast<std::size_t>(stream.num_blocks());
    ASSERT_EQ(gathers.size(), 2 * blocks);
    for (std::size_t k = 0; k + 1 < blocks; ++k) {
      const auto kernel =
          rank.runtime->entries(base::concat("forward block ", k)).at(0);
      EXPECT_FALSE(rank.runtime->happens_before(kernel, gathers[k + 1])) << k;
      EXPECT_TRUE(rank.runtime->happens_before(gathers[k], kernel)) << k;
      const auto again =
          rank.runtime->entries(base::concat("backward block ", k)).at(0);
      EXPECT_FALSE(rank.runtime->happens_before(again, gathers[blocks + k + 1]))
          << k;
    }
  });
}

TEST(RowStreamTest, AFrozenHeadGetsNoGradient) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    const auto units = model_with_head(at::kFloat, /*trainable=*/false);
    Rank rank(exchange, r, units);
    rank.unit(kHead).rows().read(RowReads::blocks);
    run_microbatch(rank, at::kFloat);
    EXPECT_FALSE(rank.shard(kHead, 0).grad().defined());
    EXPECT_EQ(rank.unrest(), "");
  });
}

TEST(RowStreamTest, ASecondLossInOneBackwardIsRefused) {
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    const auto units = model_with_head();
    Rank rank(exchange, r, units);
    const Layers::Body twice = [&](const std::vector<at::Tensor>& parameters,
                                   const at::Tensor& x) {
      const auto h = x * parameters[0];
      return SquaredLogits::apply(h, &rank) + SquaredLogits::apply(h, &rank);
    };
    const auto loss = rank.call(kModel, tokens(r, at::kFloat), twice).sum();
    EXPECT_THAT([&] { loss.backward(); },
                ThrowsMessage<std::exception>(HasSubstr(
                    "A parameter whose gradient comes in rows (a head inside "
                    "its loss, a large embedding) gets one gradient")));
    rank.root->abort();
    EXPECT_EQ(rank.unrest(), "");
  });
}

TEST(RowStreamTest, AUnitOfSeveralParametersIsRefused) {
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, model_of(1, dense()));
    EXPECT_THAT([&] { rank.unit(1).rows().read(RowReads::blocks); },
                ThrowsMessage<InvalidArgument>(HasSubstr(
                    "expected one parameter with rows, to stream them, got 2 "
                    "parameters")));
  });
}

class Heard final : public RowReceiver {
 public:
  explicit Heard(UnitGradients& gradients) : gradients_(gradients) {}
  void on_rows_chosen() override {
    events.emplace_back("chosen");
    gradients_.plan({true}, /*budget_bytes=*/1);
  }
  void on_rows_begin(RowPass pass) override {
    events.emplace_back(pass == RowPass::lookup ? "lookup" : "other pass");
  }
  void on_rows_gather(std::int64_t k) override {
    events.push_back(base::concat("gather ", k));
  }
  void on_last_rows(RowPass /*pass*/) override { events.emplace_back("last"); }
  void on_row_gradient(std::int64_t k, at::Tensor /*gradient*/) override {
    events.push_back(base::concat("gradient ", k));
  }

  std::vector<std::string> events;

 private:
  UnitGradients& gradients_;
};

// What is gathered ahead of what the unit gathers next.
TEST(RowStreamTest, TellsItsUnitOfEveryGatherAndOfTheLast) {
  auto runtime = std::make_shared<device::ScriptedRuntime>();
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    const std::shared_ptr<comm::Collectives> group =
        std::make_shared<RankCollectives>(exchange, r, runtime);
    auto memory = std::make_shared<memory::DeviceMemory>(
        runtime, std::make_shared<memory::Ledger>());
    const auto name = std::make_shared<const std::string>("head");
    const ParameterInfos infos(std::vector<ParameterInfo>{
        {"head.weight", {8, 2}, at::kFloat, at::kFloat, at::kFloat}});
    const UnitSettings settings;
    UnitParameters parameters(name, infos, *group, memory, nullptr);
    UnitGradients gradients(name, infos, parameters.buffers().layout(), group,
                            settings.reduction, memory);
    Heard heard(gradients);
    RowStream rows(name, settings, group, parameters, gradients, memory, heard);
    EXPECT_FALSE(rows.delivers_gradients());
    rows.read(RowReads::gradient);
    EXPECT_FALSE(rows.streams());
    rows.read(RowReads::lookup, /*lookup_rows=*/3).read(RowReads::blocks);
    EXPECT_TRUE(rows.looks_up());  // what was asked for stays
    rows.begin(RowPass::lookup);
    for (const std::int64_t k : {0, 1, 2}) rows.fetch(k);
    rows.end();
    rows.put(0, at::ones({3, 2}));
    EXPECT_THAT(heard.events,
                testing::ElementsAre("chosen", "lookup", "gather 0", "gather 1",
                                     "gather 2", "last", "gradient 0"));
  });
}

TEST(RowStreamTest, RowsNeedARoot) {
  auto runtime = std::make_shared<device::ScriptedRuntime>();
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    auto group = std::make_shared<RankCollectives>(exchange, r, runtime);
    auto memory = std::make_shared<memory::DeviceMemory>(
        runtime, std::make_shared<memory::Ledger>());
    auto unit = std::make_shared<Unit>(
        "head",
        std::vector<ParameterInfo>{
            {"head.weight", {8, 2}, at::kFloat, at::kFloat, at::kFloat}},
        UnitGroups{group, group}, memory);
    EXPECT_THAT(
        [&] { unit->rows().read(RowReads::blocks).begin(RowPass::forward); },
        ThrowsMessage<Error>(HasSubstr(
            "expected a forward of the root module before its rows are "
            "read")));
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
