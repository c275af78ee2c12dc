#include "shard/sleeping_bytes.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "shard/storage.h"
#include "testing/scripted_runtime.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using device::Entry;
using device::Stream;
using memory::Category;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::int64_t kNumel = 64;
constexpr std::int64_t kBytes = 4 * kNumel;

class SleepingBytesTest : public testing::Test {
 protected:
  // Leased as a unit's master is; its elements are their places.
  c10::Storage master(const std::string& name = "unit") {
    auto storage = owning_storage(
        memory_->lease(Category::parameters, name, kBytes), kBytes);
    of(storage).copy_(at::arange(kNumel, at::kFloat));
    return storage;
  }
  static at::Tensor of(const c10::Storage& storage) {
    return flat_view(storage, at::kFloat, 0,
                     static_cast<std::int64_t>(storage.nbytes()) / 4);
  }
  std::unique_ptr<SleepingBytes> sleep(
      const std::vector<SleepingBytes::Named>& tensors) {
    return std::make_unique<SleepingBytes>(tensors, memory_, host_);
  }
  std::int64_t live() const { return ledger_->total_live(); }
  // The last access on `stream`.
  std::optional<device::EntryId> last(Stream stream, Entry::Kind kind) const {
    std::optional<device::EntryId> found;
    const auto log = runtime_->log();
    for (std::size_t id = 0; id < log.size(); ++id) {
      if (log[id].stream == stream && log[id].kind == kind) found = id;
    }
    return found;
  }

  std::shared_ptr<device::ScriptedRuntime> runtime_ =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  std::shared_ptr<memory::Ledger> host_ledger_ =
      std::make_shared<memory::Ledger>();
  std::shared_ptr<memory::DeviceMemory> memory_ =
      std::make_shared<memory::DeviceMemory>(runtime_, ledger_);
  std::shared_ptr<memory::PinnedPool> host_ =
      std::make_shared<memory::PinnedPool>(
          runtime_, host_ledger_, std::numeric_limits<std::int64_t>::max());
};

TEST_F(SleepingBytesTest, WhatLiesWithinOneStorageWakesInItsPlace) {
  const auto all = master();
  const auto first = of(sub_storage(all, 0, kBytes / 4));
  const auto second = of(sub_storage(all, kBytes / 2, kBytes / 4));
  const auto view = second.narrow(0, 3, 5);
  const auto sleeping = sleep({{first, "first"}, {second, "second"}});
  EXPECT_EQ(sleeping->bytes(), kBytes);
  EXPECT_TRUE(sleeping->holds(view));
  EXPECT_EQ(live(), 0);
  for (const auto& tensor : {first, view}) {
    EXPECT_THAT([&] { tensor.const_data_ptr(); },
                testing::Throws<c10::Error>(testing::Property(
                    &c10::Error::what, HasSubstr("lowtide.wake(model"))));
    EXPECT_THROW(tensor.mutable_data_ptr(), c10::Error);
  }
  EXPECT_THROW(all.data(), c10::Error);

  sleeping->wake();
  EXPECT_EQ(live(), kBytes);
  EXPECT_EQ(ledger_->by_name(Category::parameters).at("unit").live, kBytes);
  EXPECT_FALSE(sleeping->holds(view));
  EXPECT_TRUE(of(all).equal(at::arange(kNumel, at::kFloat)));
  EXPECT_EQ(first.const_data_ptr(), all.data());
  EXPECT_EQ(second.const_data_ptr<float>(),
            of(all).const_data_ptr<float>() + 32);
  EXPECT_EQ(view[0].item<float>(), 35);
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(SleepingBytesTest, CopiesFollowComputeAndComputeFollowsThem) {
  const auto all = master();
  const auto before = runtime_->mark(Stream::compute, "before");
  const auto sleeping = sleep({{of(all), "all"}});
  const auto out = last(Stream::offload, Entry::Kind::read);
  ASSERT_TRUE(out);
  EXPECT_TRUE(runtime_->happens_before(before, *out));
  sleeping->wake();
  const auto back = last(Stream::reload, Entry::Kind::write);
  ASSERT_TRUE(back);
  const auto after = runtime_->mark(Stream::compute, "after");
  EXPECT_TRUE(runtime_->happens_before(*back, after));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(SleepingBytesTest, HostBytesServeTheNextTime) {
  const auto all = master();
  for (int i = 0; i < 3; ++i) {
    const auto sleeping = sleep({{of(all), "all"}});
    EXPECT_GE(host_ledger_->total_live(), kBytes);
    sleeping->wake();
    EXPECT_EQ(host_ledger_->total_live(), 0);
    EXPECT_EQ(host_->figures().num_registrations, 1);
  }
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(SleepingBytesTest, WhatIsDroppedHasNoCopyAndComesBackAsZeros) {
  const auto all = master();
  const auto first = of(sub_storage(all, 0, kBytes / 4));
  SleepingBytes sleeping({{first, "first"}}, memory_, nullptr);
  EXPECT_TRUE(sleeping.dropped());
  EXPECT_EQ(sleeping.bytes(), kBytes);
  EXPECT_EQ(live(), 0);
  EXPECT_EQ(host_ledger_->total_live(), 0);
  EXPECT_THAT([&] { first.const_data_ptr(); },
              testing::Throws<c10::Error>(testing::Property(
                  &c10::Error::what, HasSubstr("lowtide: first: expected one "
                                               "that was given anew"))));
  sleeping.wake();
  EXPECT_EQ(live(), kBytes);
  EXPECT_EQ(of(all).count_nonzero().item<int>(), 0);
  EXPECT_EQ(first.const_data_ptr(), all.data());
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(SleepingBytesTest, WhatNobodyHoldsStaysAway) {
  const auto kept = master("kept");
  auto dropped = master("dropped");
  const auto sleeping = sleep({{of(kept), "kept"}, {of(dropped), "dropped"}});
  dropped = c10::Storage();
  sleeping->wake();
  EXPECT_EQ(live(), kBytes);
  EXPECT_TRUE(of(kept).equal(at::arange(kNumel, at::kFloat)));
}

TEST_F(SleepingBytesTest, WithoutMemoryAllSleepOn) {
  const auto one = master("one");
  const auto other = master("other");
  const auto sleeping = sleep({{of(one), "one"}, {of(other), "other"}});
  memory_->fail_next_lease(Category::parameters, "other");
  EXPECT_THROW(sleeping->wake(), c10::OutOfMemoryError);
  EXPECT_EQ(live(), 0);
  EXPECT_THROW(one.data(), c10::Error);
  sleeping->wake();
  EXPECT_TRUE(of(one).equal(of(other)));
}

TEST_F(SleepingBytesTest, NeitherSleepsNorWakesInACapture) {
  const auto all = master();
  runtime_->set_capture(1);
  EXPECT_THROW(sleep({{of(all), "all"}}), Error);
  EXPECT_EQ(live(), kBytes);
  runtime_->set_capture(0);
  const auto sleeping = sleep({{of(all), "all"}});
  runtime_->set_capture(1);
  EXPECT_THROW(sleeping->wake(), Error);
  EXPECT_EQ(live(), 0);
  runtime_->set_capture(0);
  sleeping->wake();
}

TEST_F(SleepingBytesTest, TorchsOwnBytesComeFromItsAllocatorAgain) {
  const auto watch = runtime_->watch_torch_allocations();
  const auto state = at::arange(kNumel, at::kFloat);
  const auto sleeping =
      sleep({{state, "state"}, {state.view({8, 8}), "again"}});
  EXPECT_EQ(sleeping->bytes(), kBytes);
  EXPECT_THROW(state.const_data_ptr(), c10::Error);
  const auto second = sleep({{state, "state"}});
  EXPECT_EQ(second->bytes(), 0);
  sleeping->wake();
  EXPECT_EQ(state[7].item<float>(), 7);
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

// As torch.load makes storages.
TEST_F(SleepingBytesTest, TorchsOwnBytesSleepWhereTheStorageNamesNoAllocator) {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), kBytes,
                             c10::GetAllocator(at::kCPU)->allocate(kBytes),
                             /*allocator=*/nullptr, /*resizable=*/false);
  of(storage).copy_(at::arange(kNumel, at::kFloat));
  const auto sleeping = sleep({{of(storage), "state"}});
  EXPECT_EQ(sleeping->bytes(), kBytes);
  sleeping->wake();
  EXPECT_TRUE(of(storage).equal(at::arange(kNumel, at::kFloat)));
}

// Whoever gave them would not hear of it.
TEST_F(SleepingBytesTest, BytesOfOthersAreRefusedByName) {
  const auto all = master();
  std::vector<float> theirs(kNumel);
  const auto state = at::from_blob(theirs.data(), {kNumel});
  EXPECT_THAT(
      [&] {
        sleep({{of(all), "all"}, {state, "state"}});
      },
      testing::Throws<InvalidArgument>(testing::Property(
          &InvalidArgument::what, HasSubstr("lowtide: state: expected"))));
  EXPECT_TRUE(of(all).equal(at::arange(kNumel, at::kFloat)));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
