#include "spmd/transition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "base/check.h"
#include "spmd/rule.h"

namespace lowtide::spmd {
namespace LOWTIDE_FILE {

using testing::StrEq;
using testing::ThrowsMessage;

TEST(TransitionTest, BackwardGoesBetweenTheGradientsTypes) {
  for (const Transition& each : kTransitions) {
    EXPECT_EQ(each.backward.src, gradient_of(each.forward.dst));
    EXPECT_EQ(each.backward.dst, gradient_of(each.forward.src));
  }
}

TEST(TransitionTest, TheBackwardOfABackwardIsTheForward) {
  for (const Transition& each : kTransitions) {
    const Step& back = each.backward;
    EXPECT_EQ(transition(back.operation, back.src, back.dst).backward,
              each.forward);
  }
}

TEST(TransitionTest, NoStepIsThereTwice) {
  std::set<std::tuple<Operation, Type, Type>> seen;
  for (const Transition& each : kTransitions) {
    const Step& step = each.forward;
    EXPECT_TRUE(seen.emplace(step.operation, step.src, step.dst).second);
  }
}

TEST(TransitionTest, OtherPairsAreRefused) {
  EXPECT_THAT(
      [] { transition(Operation::all_gather, Type::P, Type::R); },
      ThrowsMessage<InvalidArgument>(StrEq(
          "lowtide: all_gather: expected one of V -> R, V -> I, got P -> R. "
          "docs/replication_rules.md has the table.")));
}

TEST(TransitionTest, WhatAnOperatorsBackwardSends) {
  using comm::Kind;
  EXPECT_EQ(backward_kind(Type::P, Type::R), Kind::all_reduce);
  EXPECT_EQ(backward_kind(Type::P, Type::I), std::nullopt);
  EXPECT_EQ(backward_kind(Type::P, Type::V), Kind::all_gather);
  EXPECT_EQ(backward_kind(Type::V, Type::R), Kind::reduce_scatter);
  EXPECT_EQ(backward_kind(Type::V, Type::I), std::nullopt);
  EXPECT_EQ(backward_kind(Type::V, Type::V), Kind::all_to_all);
}

TEST(TransitionTest, WhatTurnsOneGradientIntoAnother) {
  using comm::Kind;
  constexpr Type kAll[] = {Type::R, Type::I, Type::V, Type::P};
  const auto kind = [](Type from, Type to) { return gradient_kind(from, to); };
  for (const Type type : kAll) EXPECT_EQ(kind(type, type), std::nullopt);
  EXPECT_EQ(kind(Type::P, Type::R), Kind::all_reduce);
  EXPECT_EQ(kind(Type::P, Type::I), Kind::all_reduce);
  EXPECT_EQ(kind(Type::P, Type::V), Kind::reduce_scatter);
  EXPECT_EQ(kind(Type::V, Type::R), Kind::all_gather);
  EXPECT_EQ(kind(Type::V, Type::I), Kind::all_gather);
  for (const Type to : {Type::R, Type::I, Type::V}) {
    EXPECT_EQ(kind(Type::R, to), std::nullopt);
    EXPECT_EQ(kind(Type::I, to), std::nullopt);
  }
  EXPECT_THAT(
      [&] { kind(Type::V, Type::P); },
      ThrowsMessage<InvalidArgument>(StrEq(
          "lowtide: grad_types: expected a type that a collective can make of "
          "the gradient, got P for a gradient of type V. Leave it out, or "
          "declare V.")));
}

TEST(TransitionTest, NamesAreFoundAgain) {
  for (std::size_t i = 0; i < kNumOperations; ++i) {
    const auto operation = static_cast<Operation>(i);
    EXPECT_EQ(operation_named(operation_name(operation)), operation);
  }
  EXPECT_EQ(operation_named("gather"), std::nullopt);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::spmd
