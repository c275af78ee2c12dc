// Every rule on every combination of up to three inputs, against what the types
// mean: a value is described by how it may differ from rank to rank.
#include "spmd/rule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/check.h"

namespace lowtide::spmd {
namespace LOWTIDE_FILE {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Type kTypes[] = {Type::R, Type::I, Type::V, Type::P, Type::constant};

std::vector<std::vector<Operand>> combinations(std::size_t length) {
  if (length == 0) return {{}};
  std::vector<std::vector<Operand>> result;
  for (const auto& shorter : combinations(length - 1)) {
    for (const Type type : kTypes) {
      for (const bool needs_gradient : {false, true}) {
        auto longer = shorter;
        longer.push_back({type, needs_gradient});
        result.push_back(longer);
      }
    }
  }
  return result;
}

bool has(const std::vector<Operand>& operands, Type type) {
  return std::any_of(operands.begin(), operands.end(),
                     [&](const Operand& each) { return each.type == type; });
}

std::int64_t number_of(const std::vector<Operand>& operands, Type type) {
  return std::count_if(operands.begin(), operands.end(),
                       [&](const Operand& each) { return each.type == type; });
}

bool all(const std::vector<Operand>& operands, Type type) {
  return number_of(operands, type) ==
         static_cast<std::int64_t>(operands.size());
}

// What must hold whenever a rule accepts its inputs.
void expect_sound(const Rule& rule, const std::vector<Operand>& in, Type out) {
  const bool communicates = rule.kind == RuleKind::collective;
  const bool promises = rule.kind == RuleKind::same_as ||
                        rule.kind == RuleKind::constant || communicates;
  if (promises) return;
  const std::string what = describe(rule);
  // Ranks with unequal inputs have unequal outputs.
  if (has(in, Type::V) && rule.kind != RuleKind::random) {
    EXPECT_EQ(out, Type::V) << what;
  }
  if (has(in, Type::P)) {
    EXPECT_EQ(out, Type::P) << what;
  }
  if (is_replica(out)) {
    EXPECT_FALSE(has(in, Type::V) || has(in, Type::P)) << what;
  }
  // The gradient an invariant input gets is whole only from invariant outputs.
  for (const Operand& each : in) {
    if (each.type == Type::I && each.needs_gradient &&
        rule.kind != RuleKind::host) {
      EXPECT_EQ(out, Type::I) << what;
    }
  }
}

std::vector<Rule> rules() {
  std::vector<Rule> all;
  for (std::size_t kind = 0; kind < kNumRuleKinds; ++kind) {
    if (static_cast<RuleKind>(kind) == RuleKind::collective) continue;
    for (const std::int64_t index : {0, 1, 2}) {
      all.push_back({static_cast<RuleKind>(kind), index});
    }
  }
  for (const Type src : {Type::P, Type::V}) {
    for (const Type dst : {Type::R, Type::I, Type::V}) {
      all.push_back(COLLECTIVE(src, dst));
    }
  }
  return all;
}

TEST(RuleTest, EveryRuleIsSoundOrSaysWhatIsWrong) {
  std::size_t accepted = 0, refused = 0;
  for (const Rule& rule : rules()) {
    for (std::size_t length = 0; length <= 3; ++length) {
      for (const auto& operands : combinations(length)) {
        const Inference found = infer(rule, operands);
        EXPECT_EQ(found.type.has_value(), found.problem == Problem::none);
        EXPECT_EQ(problem_text(found.problem).empty(), found.type.has_value());
        EXPECT_EQ(remedy(found.problem, "'tp'").empty(),
                  found.type.has_value());
        ++(found.type ? accepted : refused);
        if (found.type) expect_sound(rule, operands, *found.type);
      }
    }
  }
  EXPECT_EQ(accepted + refused, rules().size() * (1 + 10 + 100 + 1000));
  EXPECT_GT(accepted, 1000u);
  EXPECT_GT(refused, 1000u);
}

TEST(RuleTest, WithoutPartialSumsAllLocalRulesAgree) {
  for (const auto& operands : combinations(3)) {
    if (has(operands, Type::P)) continue;
    const Inference local = infer(LOCAL, operands);
    for (const Rule& rule : {LINEAR, MULTILINEAR, Rule{RuleKind::quotient}}) {
      EXPECT_EQ(infer(rule, operands).type, local.type);
      EXPECT_EQ(infer(rule, operands).problem, local.problem);
    }
  }
}

TEST(RuleTest, PartialSums) {
  for (const auto& in : combinations(2)) {
    if (!has(in, Type::P)) continue;
    EXPECT_FALSE(infer(LOCAL, in).type);
    const bool invariant = has(in, Type::I);
    EXPECT_EQ(infer(LINEAR, in).type.has_value(), all(in, Type::P));
    const bool product = number_of(in, Type::P) == 1 && !has(in, Type::V);
    // An I that needs no gradient counts as R.
    const bool mixed =
        invariant &&
        (in[0].type == Type::I ? in[0].needs_gradient : in[1].needs_gradient);
    EXPECT_EQ(infer(MULTILINEAR, in).type.has_value(), product && !mixed);
    const bool below = in[1].type == Type::P;
    EXPECT_EQ(infer({RuleKind::quotient}, in).type.has_value(),
              product && !mixed && !below);
  }
}

TEST(RuleTest, ABiasIsAddedToAProduct) {
  const Rule bias_last{RuleKind::affine, 2};
  const Operand p{Type::P}, r{Type::R}, v{Type::V};
  EXPECT_EQ(infer(bias_last, {p, r, p}).type, Type::P);
  EXPECT_EQ(infer(bias_last, {p, r, r}).problem, Problem::partial_and_other);
  EXPECT_EQ(infer(bias_last, {p, r}).type, Type::P);  // no bias
  EXPECT_EQ(infer(bias_last, {v, r, r}).type, Type::V);
  EXPECT_EQ(infer({RuleKind::affine, 0}, {r, p, r}).problem,
            Problem::partial_and_other);
}

TEST(RuleTest, WhatNeedsNoGradientIsReplicatedAndInvariantAlike) {
  const Operand frozen{Type::I, false}, invariant{Type::I}, r{Type::R},
      v{Type::V};
  EXPECT_EQ(infer(LOCAL, {frozen, r}).type, Type::R);
  EXPECT_EQ(infer(LOCAL, {frozen, v}).type, Type::V);
  EXPECT_EQ(infer(LOCAL, {{Type::R, false}, invariant}).type, Type::I);
  EXPECT_EQ(infer(LOCAL, {{Type::R, false}, frozen}).type, Type::R);
  EXPECT_EQ(infer(LOCAL, {invariant, r}).problem, Problem::invariant_mixed);
}

TEST(RuleTest, ACollectiveTakesItsSourceTypeOnly) {
  for (const Type type : kTypes) {
    const Inference found = infer(COLLECTIVE(Type::P, Type::R), {{type}});
    EXPECT_EQ(found.type.has_value(), type == Type::P);
  }
  // A gather and a product with a sharded weight.
  EXPECT_EQ(infer(COLLECTIVE(Type::V, Type::R), {{Type::V}, {Type::V}}).type,
            Type::V);
}

TEST(RuleTest, OnlyPairsWithACollectiveAreCollectives) {
  for (const Type src : kTypes) {
    for (const Type dst : kTypes) {
      const bool right = (src == Type::P || src == Type::V) &&
                         (is_replica(dst) || dst == Type::V) &&
                         dst != Type::constant;
      if (right) {
        EXPECT_EQ(COLLECTIVE(src, dst).dst, dst);
      } else {
        EXPECT_THROW(COLLECTIVE(src, dst), InvalidArgument);
      }
    }
  }
  EXPECT_THAT([] { COLLECTIVE(Type::R, Type::P); },
              ThrowsMessage<InvalidArgument>(HasSubstr(
                  "lowtide: COLLECTIVE: expected one of (P, R), (P, I), (P, V),"
                  " (V, R), (V, I), (V, V), got (R, P).")));
}

TEST(RuleTest, NumbersAreTheSameOnAllRanks) {
  const Rule host{RuleKind::host};
  EXPECT_TRUE(infer(host, {{Type::R}}).type);
  EXPECT_EQ(infer(host, {{Type::V}}).problem, Problem::differs_by_rank);
  EXPECT_EQ(infer(host, {{Type::P}}).problem, Problem::differs_by_rank);
}

TEST(TypeTest, TheGradientOfAGradientIsTheType) {
  for (const Type type : kTypes) {
    EXPECT_EQ(gradient_of(gradient_of(type)), type);
    EXPECT_EQ(type_named(type_name(type)), type);
  }
  EXPECT_EQ(type_named("X"), std::nullopt);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::spmd
