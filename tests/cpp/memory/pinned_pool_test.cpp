#include "memory/pinned_pool.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "testing/scripted_runtime.h"

namespace lowtide::memory {
namespace LOWTIDE_FILE {

using device::Stream;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr auto kNoCap = std::numeric_limits<std::int64_t>::max();

struct Pool {
  explicit Pool(std::int64_t cap = kNoCap)
      : pool(std::make_shared<PinnedPool>(runtime, ledger, cap)) {}

  std::int64_t live() const {
    return ledger->live()[static_cast<std::size_t>(Category::activations)];
  }

  std::shared_ptr<device::ScriptedRuntime> runtime =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
  std::shared_ptr<PinnedPool> pool;
};

// Warnings while it lives.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

TEST(PinnedPoolTest, RegistersExactSizesOnceAndReusesThem) {
  Pool p;
  for (int step = 0; step < 3; ++step) {
    std::vector<HostSlot> slots;
    for (int i = 0; i < 4; ++i) slots.push_back(p.pool->acquire("x", 1000));
    slots.push_back(p.pool->acquire("y", 24));
    EXPECT_EQ(p.live(), 4024);
    EXPECT_EQ(p.ledger->by_name(Category::activations).at("x").live, 4000);
  }
  EXPECT_EQ(p.live(), 0);
  const auto figures = p.pool->figures();
  EXPECT_EQ(figures.pinned_bytes, 4024);
  EXPECT_EQ(figures.num_registrations, 5);
  EXPECT_GT(figures.registration_ns, 0);
  EXPECT_EQ(figures.peak_pageable_bytes, 0);
}

TEST(PinnedPoolTest, BeyondTheCapSlotsArePageableAndReportedOnce) {
  Warnings warnings;
  Pool p(2000);
  {
    std::vector<HostSlot> slots;
    for (int i = 0; i < 4; ++i) slots.push_back(p.pool->acquire("x", 1000));
    EXPECT_EQ(p.pool->figures().pageable_bytes, 2000);
    EXPECT_EQ(p.live(), 4000);
  }
  EXPECT_EQ(p.pool->figures().pageable_bytes, 0);
  EXPECT_EQ(p.pool->figures().peak_pageable_bytes, 2000);
  EXPECT_EQ(p.pool->figures().pinned_bytes, 2000);
  EXPECT_THAT(
      warnings.texts,
      ElementsAre("lowtide: host memory for activations: expected at most 2000 "
                  "page-locked bytes, and the system to give them, got a "
                  "request for 1000 more. These copies use pageable memory and "
                  "block the host; offload less, or raise "
                  "LOWTIDE_PINNED_BYTES."));
}

TEST(PinnedPoolTest, FreeSlotsOfOtherSizesMakeRoom) {
  Pool p(2000);
  p.pool->acquire("x", 1500);
  const HostSlot slot = p.pool->acquire("x", 1600);
  EXPECT_EQ(p.pool->figures().pinned_bytes, 1600);
  EXPECT_EQ(p.pool->figures().peak_pageable_bytes, 0);
}

// What is broken when a slot is used in one graph capture and then in another;
// 0 is none.  `waits`: for the copy from the slot, before it is written again;
// `awaited`: by compute, before it is given back.
std::vector<std::string> reuse(bool waits, std::uint64_t first = 0,
                               std::uint64_t then = 0, bool awaited = true) {
  Pool p;
  auto& runtime = *p.runtime;
  runtime.set_capture(first);
  c10::DataPtr value = runtime.allocate(64);
  runtime.wait(Stream::offload, runtime.record(Stream::compute));
  runtime.wait(Stream::reload, runtime.record(Stream::compute));
  {
    HostSlot slot = p.pool->acquire("x", 64);
    runtime.copy(Stream::reload, value.mutable_get(), slot.data(), 64,
                 device::Copy::to_device);
    const device::Event copied = runtime.record(Stream::reload);
    slot.set_last_use(copied);
    if (awaited) runtime.wait(Stream::compute, copied);
  }
  runtime.set_capture(then);
  HostSlot again = p.pool->acquire("x", 64);
  if (waits) again.wait_for_last_use(Stream::offload);
  runtime.touches(Stream::offload, again.data(), 64, device::Access::write);
  auto broken = runtime.violations();
  runtime.synchronize(Stream::reload);
  return broken;
}

TEST(PinnedPoolTest, ASlotRemembersTheCopyThatStillReadsIt) {
  EXPECT_THAT(reuse(true), IsEmpty());
  EXPECT_THAT(reuse(false), ElementsAre(HasSubstr("write on offload")));
}

// [Note: Slots in graphs]
TEST(PinnedPoolTest, ComputeOrdersTheUsesAcrossTheBeginningOfACapture) {
  constexpr std::pair<int, int> kUses[] = {{0, 1}, {1, 2}, {1, 1}};
  for (const auto& [first, then] : kUses) {
    EXPECT_THAT(reuse(true, first, then), IsEmpty()) << first << then;
    EXPECT_THAT(reuse(false, first, then),
                ElementsAre(HasSubstr("write on offload")));
  }
  EXPECT_THAT(reuse(true, 0, 1, /*awaited=*/false),
              ElementsAre(HasSubstr("write on offload")));
  EXPECT_THAT(reuse(true, 0, 0, /*awaited=*/false), IsEmpty());
}

TEST(PinnedPoolTest, WhatACaptureTakesServesCapturesOnly) {
  Pool p;
  const auto where = [&](std::uint64_t capture) {
    p.runtime->set_capture(capture);
    return p.pool->acquire("x", 500).data();
  };
  void* const eager = where(0);
  EXPECT_EQ(where(1), eager);  // left from the steps before
  void* const another = where(0);
  EXPECT_NE(another, eager);
  EXPECT_EQ(where(0), another);
  EXPECT_EQ(where(2), eager);
  EXPECT_EQ(p.pool->figures().num_registrations, 2);
}

TEST(PinnedPoolTest, SlotsOfAGraphNeverMakeRoom) {
  Pool p(2000);
  p.runtime->set_capture(1);
  void* const in_graph = p.pool->acquire("x", 500).data();
  p.runtime->set_capture(0);
  p.pool->acquire("x", 1500);
  const HostSlot slot = p.pool->acquire("x", 1400);  // instead of that
  EXPECT_EQ(p.pool->figures().pinned_bytes, 1900);
  EXPECT_EQ(p.pool->figures().peak_pageable_bytes, 0);
  p.runtime->set_capture(2);
  EXPECT_EQ(p.pool->acquire("x", 500).data(), in_graph);
}

TEST(PinnedPoolTest, AGraphTakesNoPageableSlots) {
  Warnings warnings;
  Pool p(2000);
  p.pool->acquire("x", 1500);
  p.runtime->set_capture(1);
  try {
    p.pool->acquire("y", 1600);  // making room would wait for the device
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "lowtide: host memory for activations: expected at most 2000 "
        "page-locked bytes, and the system to give them, got a request for "
        "1600 more. A graph captures no copies of pageable memory: offload "
        "less, raise LOWTIDE_PINNED_BYTES, or run the steps without a graph.");
  }
  EXPECT_EQ(p.live(), 0);
  EXPECT_THAT(warnings.texts, IsEmpty());
}

TEST(PinnedPoolTest, ThePoolWaitsForCopiesBeforeItGivesItsBytesBack) {
  auto runtime = std::make_shared<device::ScriptedRuntime>();
  {
    const auto pool =
        std::make_shared<PinnedPool>(runtime, std::make_shared<Ledger>(), 100);
    const HostSlot slot = pool->acquire("x", 64);
    runtime->touches(Stream::offload, slot.data(), 64, device::Access::write);
  }
  EXPECT_THAT(runtime->violations(), IsEmpty());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::memory
