#include "memory/ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "base/check.h"

namespace lowtide::memory {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Key;
using testing::StrEq;
using testing::ThrowsMessage;

constexpr auto kGathered = Category::gathered;
constexpr auto kSlab = Category::gradient_slab;

std::int64_t of(const Bytes& bytes, Category category) {
  return bytes[static_cast<std::size_t>(category)];
}

TEST(LedgerTest, CategoriesHaveTheNamesReportsShow) {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kNumCategories; ++i) {
    names.push_back(category_name(static_cast<Category>(i)));
  }
  EXPECT_THAT(names, ElementsAre("parameters", "gathered", "gather_input",
                                 "gradient_stream", "gradient_slab",
                                 "sharded_gradients", "activations"));
}

TEST(LedgerTest, ACategoryIsFoundByItsName) {
  for (std::size_t i = 0; i < kNumCategories; ++i) {
    const auto category = static_cast<Category>(i);
    EXPECT_EQ(category_of(category_name(category)), category);
  }
  EXPECT_THAT(
      [] { category_of("grads"); },
      ThrowsMessage<InvalidArgument>(StrEq(
          "lowtide: memory category: expected one of parameters, gathered, "
          "gather_input, gradient_stream, gradient_slab, sharded_gradients, "
          "activations, got 'grads'. Use a name from that list.")));
}

TEST(LedgerTest, EachCategoryPeaksAtItsOwnWorstMoment) {
  Ledger ledger;
  ledger.add(kGathered, "a", 100);
  ledger.remove(kGathered, "a", 100);
  ledger.add(kSlab, "a", 70);
  ledger.add(kGathered, "b", 40);
  ledger.remove(kSlab, "a", 70);

  EXPECT_EQ(of(ledger.live(), kGathered), 40);
  EXPECT_EQ(of(ledger.live(), kSlab), 0);
  EXPECT_EQ(ledger.total_live(), 40);
  EXPECT_EQ(of(ledger.peak(), kGathered), 100);
  EXPECT_EQ(of(ledger.peak(), kSlab), 70);
  EXPECT_EQ(ledger.total_peak(), 110);
  EXPECT_EQ(of(ledger.at_total_peak(), kGathered), 40);
  EXPECT_EQ(of(ledger.at_total_peak(), kSlab), 70);
  EXPECT_EQ(ledger.num_leases(kGathered), 2);
  EXPECT_EQ(ledger.num_leases(kSlab), 1);
}

TEST(LedgerTest, NamesAreKeptApartAndPerCategory) {
  Ledger ledger;
  ledger.add(kGathered, "layers.0", 100);
  ledger.add(kGathered, "layers.0", 50);
  ledger.remove(kGathered, "layers.0", 100);
  ledger.add(kGathered, "layers.1", 7);
  ledger.add(kSlab, "layers.0", 1);

  const auto gathered = ledger.by_name(kGathered);
  EXPECT_THAT(gathered, ElementsAre(Key("layers.0"), Key("layers.1")));
  EXPECT_EQ(gathered.at("layers.0").live, 50);
  EXPECT_EQ(gathered.at("layers.0").peak, 150);
  EXPECT_EQ(gathered.at("layers.1").live, 7);
  EXPECT_EQ(ledger.by_name(kSlab).at("layers.0").live, 1);
  EXPECT_THAT(ledger.by_name(Category::parameters), IsEmpty());
}

TEST(LedgerTest, ResetMakesWhatIsLiveThePeak) {
  Ledger ledger;
  ledger.add(kGathered, "gone", 100);
  ledger.add(kGathered, "kept", 30);
  ledger.remove(kGathered, "kept", 10);
  ledger.remove(kGathered, "gone", 100);
  ledger.reset_peaks();

  EXPECT_EQ(of(ledger.peak(), kGathered), 20);
  EXPECT_EQ(ledger.total_peak(), 20);
  EXPECT_EQ(of(ledger.at_total_peak(), kGathered), 20);
  EXPECT_EQ(ledger.num_leases(kGathered), 0);
  EXPECT_THAT(ledger.by_name(kGathered), ElementsAre(Key("kept")));
  EXPECT_EQ(ledger.by_name(kGathered).at("kept").peak, 20);
}

TEST(LedgerTest, GivingBackWhatWasNotLeasedIsAnInvariantFailure) {
  Ledger ledger;
  ledger.add(kGathered, "a", 100);
  EXPECT_THROW(ledger.remove(kGathered, "b", 1), Error);
  EXPECT_THROW(ledger.remove(kSlab, "a", 1), Error);
  EXPECT_THROW(ledger.remove(kGathered, "a", 101), Error);
  EXPECT_THROW(ledger.add(kGathered, "a", 0), Error);
  EXPECT_EQ(ledger.total_live(), 100);
}

TEST(LedgerTest, ObserverSeesEveryChange) {
  Ledger ledger;
  std::vector<std::int64_t> seen;
  ledger.observe([&](const Bytes& live) { seen.push_back(of(live, kSlab)); });
  ledger.add(kSlab, "a", 3);
  ledger.add(kSlab, "b", 4);
  ledger.remove(kSlab, "a", 3);
  ledger.observe(nullptr);
  ledger.remove(kSlab, "b", 4);
  EXPECT_THAT(seen, ElementsAre(3, 7, 4));
}

TEST(LedgerTest, LeasesAreLoggedFromTheFirstQuestionOn) {
  Ledger ledger;
  const int early = 0;
  const int late = 0;
  ledger.add(kGathered, "layers.0", 8, &early);
  EXPECT_THAT(ledger.take_log(), IsEmpty());

  ledger.add(kGathered, "layers.1", 8, &late);
  ledger.add(kSlab, "gradients", 4);  // of no address
  const auto logged = ledger.take_log();
  ASSERT_EQ(logged.size(), 1u);
  EXPECT_EQ(logged[0].begin, &late);
  EXPECT_EQ(logged[0].category, kGathered);
  EXPECT_EQ(logged[0].name, "layers.1");
  EXPECT_THAT(ledger.take_log(), IsEmpty());
}

TEST(LedgerTest, ASecondObserverIsRefused) {
  Ledger ledger;
  ledger.observe([](const Bytes&) {});
  EXPECT_THAT(
      [&] { ledger.observe([](const Bytes&) {}); },
      ThrowsMessage<Error>(StrEq(
          "lowtide: ledger: expected at most one observer at a time, got a "
          "second one. Stop the running AllocationTimeline before starting "
          "another.")));
}

TEST(LedgerTest, ThreadsLeaseAtTheSameTime) {
  Ledger ledger;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&ledger, t] {
      const std::string name = "unit." + std::to_string(t);
      for (int i = 0; i < 1000; ++i) {
        ledger.add(kGathered, name, 8);
        ledger.add(kGathered, name, 8);
        ledger.remove(kGathered, name, 8);
        ledger.remove(kGathered, name, 8);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ledger.total_live(), 0);
  EXPECT_EQ(ledger.num_leases(kGathered), 8000);
  EXPECT_LE(ledger.total_peak(), 64);
  for (const auto& [name, named] : ledger.by_name(kGathered)) {
    EXPECT_EQ(named.peak, 16) << name;
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::memory
