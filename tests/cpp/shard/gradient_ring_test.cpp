#include "shard/gradients/gradient_ring.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "memory/ledger.h"
#include "shard/storage.h"
#include "testing/scripted_runtime.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using device::Stream;
using memory::Category;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

class GradientRingTest : public testing::Test {
 protected:
  std::int64_t live() const {
    return ledger_->live()[static_cast<std::size_t>(Category::gradient_stream)];
  }
  // Bytes that `reduce` reads last.
  at::Tensor source(std::int64_t bytes) {
    at::Tensor tensor = at::empty({bytes}, at::kByte);
    runtime_->mark(Stream::reduce, "copy");
    return tensor;
  }
  // Whether what is enqueued on compute now comes after that entry.
  void retire(std::int64_t bytes) {
    ring_.retire({source(bytes).storage()}, bytes);
    ring_.reclaim(100);
  }
  const c10::Storage& slot(std::size_t i, std::int64_t bytes,
                           at::ScalarType dtype = at::kFloat) {
    return ring_.slot(i, bytes, dtype);
  }
  at::Tensor values(const c10::Storage& slot) {
    return flat_view(slot, at::kByte, 0,
                     static_cast<std::int64_t>(slot.nbytes()));
  }
  bool compute_is_behind(device::EntryId entry) {
    return runtime_->happens_before(entry,
                                    runtime_->mark(Stream::compute, "next"));
  }

  std::shared_ptr<device::ScriptedRuntime> runtime_ =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  GradientRing ring_{"model",
                     std::make_shared<memory::DeviceMemory>(runtime_, ledger_)};
};

TEST_F(GradientRingTest, WhatAnotherStreamCopiesGoesBackBehindThatCopy) {
  for (const bool releases : {false, true}) {
    const auto storage = source(1).storage();
    const auto copy = runtime_->mark(Stream::offload, "copy to the host");
    ring_.retire(storage, runtime_->record(Stream::offload));
    const auto before = storage.use_count();
    releases ? ring_.release() : ring_.reclaim(0);
    EXPECT_LT(storage.use_count(), before);
    EXPECT_TRUE(compute_is_behind(copy));
  }
}

TEST_F(GradientRingTest, SlotsAreLeasedWhenTheyAreNeeded) {
  ring_.fit(100);
  EXPECT_EQ(live(), 0);
  const void* bytes = slot(0, 100).data();
  EXPECT_EQ(live(), 100);
  EXPECT_EQ(slot(0, 100).data(), bytes);
  slot(1, 100);
  EXPECT_EQ(live(), 200);
  ring_.release();
  EXPECT_EQ(live(), 0);
}

// Padding is sent, and nobody writes to it.
TEST_F(GradientRingTest, BytesAreZeroUntilTheyAreOfADtype) {
  values(slot(0, 64)).fill_(7);
  EXPECT_TRUE(values(slot(0, 64)).eq(7).all().item<bool>());
  EXPECT_TRUE(values(slot(1, 64)).eq(0).all().item<bool>());
  EXPECT_TRUE(values(slot(0, 64, at::kBFloat16)).eq(0).all().item<bool>());
  ring_.drop_slots();
  EXPECT_TRUE(values(slot(0, 64)).eq(0).all().item<bool>());
  runtime_->expect_clean();
}

TEST_F(GradientRingTest, AShorterChunkGetsALongSlot) {
  ring_.fit(100);
  EXPECT_EQ(slot(0, 60).nbytes(), 100u);
}

// The unit with slots of its own is over: theirs may still be read.
TEST_F(GradientRingTest, ALongerSlotThanIsNeededGoesBehindItsLastUse) {
  slot(0, 1000);
  const auto use = runtime_->mark(Stream::reduce, "chunk");
  ring_.fit(100);
  EXPECT_EQ(slot(0, 100).nbytes(), 100u);
  EXPECT_EQ(live(), 1100);
  EXPECT_EQ(ring_.retired_bytes(), 1000);
  EXPECT_FALSE(compute_is_behind(use));
  ring_.reclaim(0);
  EXPECT_EQ(live(), 100);
  EXPECT_TRUE(compute_is_behind(use));
}

TEST_F(GradientRingTest, SlotsThatNoUnitHasAnyMoreGoBehindTheirLastUse) {
  ring_.fit(100);
  for (const std::size_t i : {0, 1, 3}) slot(i, 100);
  const auto on_its_way = values(slot(3, 100));
  const auto use = runtime_->mark(Stream::reduce, "chunk");
  ring_.retire_slots(1);
  EXPECT_EQ(ring_.retired_bytes(), 100);
  EXPECT_EQ(live(), 300);
  EXPECT_FALSE(compute_is_behind(use));
  ring_.reclaim(0);
  EXPECT_EQ(live(), 200);
  EXPECT_TRUE(compute_is_behind(use));
}

// A unit with slots of its own begins: they take the place of the others.
TEST_F(GradientRingTest, AShorterSlotGoesBeforeALongerOneIsLeased) {
  ring_.fit(100);
  slot(0, 100);
  ring_.catch_up_reduce();
  const auto use = runtime_->mark(Stream::reduce, "chunk");
  ledger_->reset_peaks();
  EXPECT_EQ(slot(0, 1000).nbytes(), 1000u);
  EXPECT_EQ(
      ledger_->peak()[static_cast<std::size_t>(Category::gradient_stream)],
      1000);
  EXPECT_TRUE(compute_is_behind(use));
}

TEST_F(GradientRingTest, ComputeWaitsForSourcesBeyondTheBudget) {
  retire(60);
  retire(40);
  const auto second = runtime_->entries("copy").back();
  EXPECT_EQ(ring_.retired_bytes(), 100);
  retire(50);
  const auto third = runtime_->entries("copy").back();
  EXPECT_EQ(ring_.retired_bytes(), 90);  // the first has gone
  EXPECT_FALSE(compute_is_behind(second));
  ring_.reclaim(50);
  EXPECT_EQ(ring_.retired_bytes(), 50);
  EXPECT_TRUE(compute_is_behind(second));
  EXPECT_FALSE(compute_is_behind(third));
}

TEST_F(GradientRingTest, DroppedSlotsTakeTheSourcesWithThem) {
  ring_.fit(100);
  slot(0, 100);
  ring_.catch_up_reduce();
  retire(60);
  const auto copy = runtime_->entries("copy").back();
  ring_.drop_slots();
  EXPECT_EQ(live(), 0);
  EXPECT_EQ(ring_.retired_bytes(), 0);
  EXPECT_TRUE(compute_is_behind(copy));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
