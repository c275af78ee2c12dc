#include "activation/names.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lowtide::activation {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(NameBookTest, AViewHasTheNamesOfItsBytes) {
  NameBook book;
  const at::Tensor x = at::zeros({2, 3});
  book.add(x, "a");
  book.add(x.t(), "b");
  book.add(x, "a");
  EXPECT_THAT(book.of(x.view({6})), ElementsAre("a", "b"));
  EXPECT_THAT(book.of(at::zeros({2, 3})), IsEmpty());
  EXPECT_THAT(book.all(), ElementsAre("a", "b"));
}

TEST(NameBookTest, AWriteEndsTheNames) {
  NameBook book;
  at::Tensor x = at::zeros({3});
  book.add(x, "a");
  x.add_(1);
  EXPECT_THAT(book.of(x), IsEmpty());
  book.add(x, "b");
  EXPECT_THAT(book.of(x), ElementsAre("b"));
}

TEST(NameBookTest, AnAddressUsedAgainHasNoNames) {
  NameBook book;
  for (int i = 0; i < 1000; ++i) {
    const at::Tensor x = at::zeros({3});
    EXPECT_THAT(book.of(x), IsEmpty());
    book.add(x, "a");
  }
}

TEST(RegionFiguresTest, CountsByNameUntilReset) {
  RegionFigures figures;
  figures.change("a", [](NameFigures& f) { ++f.matched; });
  figures.change("a", [](NameFigures& f) { ++f.skipped["small"]; });
  EXPECT_EQ(figures.names().at("a").matched, 1);
  EXPECT_EQ(figures.names().at("a").skipped.at("small"), 1);
  figures.reset();
  EXPECT_THAT(figures.names(), IsEmpty());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::activation
