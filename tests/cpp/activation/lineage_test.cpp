#include "activation/lineage.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lowtide::activation {
namespace LOWTIDE_FILE {

TEST(LineageTest, TheFirstWriterOfAStorageIsItsProducer) {
  Lineage lineage;
  at::Tensor x = at::zeros({2, 3});
  lineage.made(x, 7, 4, 1);
  lineage.made(x.view({6}), 8, 5, 0);  // an alias, whatever its schema says
  EXPECT_EQ(lineage.producer_of(x.t()).number, 4);
  EXPECT_EQ(lineage.producer_of(x.t()).place, 1);
  EXPECT_FALSE(lineage.producer_of(x).written_since);
  x.add_(1);
  EXPECT_TRUE(lineage.producer_of(x).written_since);
  // As collectives write, which bump no version.
  const at::Tensor y = at::zeros({2, 3});
  lineage.made(y, 7, 6, 0);
  lineage.wrote(y, 9);
  EXPECT_TRUE(lineage.producer_of(y).written_since);
  EXPECT_EQ(lineage.producer_of(at::zeros({2, 3})).number, -1);
}

TEST(LineageTest, AValueIsOfItsCallAndItsPlaceThere) {
  Lineage first;
  Lineage second;
  const at::Tensor a = at::zeros({4});
  const at::Tensor b = at::zeros({4});
  first.made(a, 7, 0, 0);
  second.made(b, 7, 3, 0);
  EXPECT_EQ(first.of(a), second.of(b));
  EXPECT_EQ(first.of(a.view({2, 2})), second.of(b.view({2, 2})));
  EXPECT_NE(first.of(a), first.of(a.view({2, 2})));
  EXPECT_NE(first.of(a.slice(0, 0, 2)), first.of(a.slice(0, 2, 4)));
  const at::Tensor other = at::zeros({4});
  first.made(other, 7, 0, 1);
  EXPECT_NE(first.of(a), first.of(other));
}

TEST(LineageTest, WhatNoCallMadeIsToldApartByItsGeometry) {
  Lineage lineage;
  const at::Tensor x = at::zeros({2, 3});
  EXPECT_EQ(lineage.of(x), lineage.of(at::zeros({2, 3}, at::kDouble)));
  EXPECT_NE(lineage.of(x), lineage.of(at::zeros({3, 2})));
  EXPECT_NE(lineage.of(x), lineage.of(at::zeros({3, 2}).t()));
}

TEST(LineageTest, AWriteMakesAnotherValue) {
  Lineage announced;
  Lineage unseen;
  at::Tensor x = at::zeros({2});
  announced.made(x, 7, 0, 0);
  unseen.made(x, 7, 0, 0);
  const auto before = announced.of(x);
  x.add_(1);
  announced.wrote(x, 9);
  EXPECT_NE(announced.of(x), before);
  EXPECT_NE(unseen.of(x), before);
  EXPECT_NE(announced.of(x), unseen.of(x));
  // Arguments too.
  at::Tensor argument = at::zeros({2});
  const auto given = announced.of(argument);
  argument.add_(1);
  announced.wrote(argument, 9);
  EXPECT_NE(announced.of(argument), given);
}

TEST(LineageTest, AParameterIsItselfWhoeverWroteItsBytes) {
  Lineage lineage;
  at::Tensor gathered = at::zeros({2, 2});
  lineage.given(gathered);
  const auto given = lineage.of(gathered);
  const auto view = lineage.of(gathered.t());
  gathered.fill_(1);
  lineage.wrote(gathered, 9);
  EXPECT_NE(lineage.of(gathered), given);
  lineage.given(gathered);
  EXPECT_EQ(lineage.of(gathered), given);
  EXPECT_EQ(lineage.of(gathered.t()), view);
  EXPECT_EQ(lineage.producer_of(gathered).number, -1);

  // In the second forward too.
  Lineage again;
  again.given(gathered);
  EXPECT_EQ(again.of(gathered), given);
  const at::Tensor other = at::zeros({2, 2});
  again.given(other);
  EXPECT_NE(again.of(other), given);
  EXPECT_NE(again.of(other.t()), view);
}

TEST(LineageTest, AnArgumentIsNoParameterInEitherForward) {
  const at::Tensor parameter = at::zeros({2, 2});
  Lineage first({parameter});
  first.given(parameter);
  const at::Tensor argument = parameter.detach();
  Lineage second({argument});
  EXPECT_EQ(first.of(parameter), second.of(argument));
}

TEST(LineageTest, ALeafThatRequiresGradIsGiven) {
  Lineage lineage;
  at::Tensor leaf = at::zeros({2, 2});
  const auto given = lineage.of(leaf);
  lineage.made(leaf, 7, 0, 0);
  leaf.requires_grad_(true);
  EXPECT_EQ(lineage.of(leaf), given);
}

TEST(LineageTest, AnAddressUsedAgainHasNoPast) {
  Lineage lineage;
  const auto given = lineage.of(at::zeros({3}));
  for (int i = 0; i < 1000; ++i) {
    const at::Tensor x = at::zeros({3});
    EXPECT_EQ(lineage.of(x), given);
    lineage.made(x, 7, i, 0);
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::activation
