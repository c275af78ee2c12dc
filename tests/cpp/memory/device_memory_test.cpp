#include "memory/device_memory.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/wrapped_bytes.h"
#include "device/allocation_observer.h"
#include "device/cpu_runtime.h"

namespace lowtide::memory {
namespace LOWTIDE_FILE {

using testing::HasSubstr;

class DeviceMemoryTest : public testing::Test {
 protected:
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  DeviceMemory memory_{std::make_shared<device::CpuRuntime>(), ledger_};
};

TEST_F(DeviceMemoryTest, ALeaseIsInTheLedgerUntilItsBytesDie) {
  c10::DataPtr lease = memory_.lease(Category::gathered, "layers.0", 4096);
  ASSERT_NE(lease.get(), nullptr);
  EXPECT_EQ(lease.device(), memory_.runtime().device());
  EXPECT_EQ(ledger_->by_name(Category::gathered).at("layers.0").live, 4096);
  lease.clear();
  EXPECT_EQ(ledger_->total_live(), 0);
  EXPECT_EQ(ledger_->total_peak(), 4096);
}

TEST_F(DeviceMemoryTest, AStorageTakesTheLeaseOverAndKeepsItWritable) {
  c10::DataPtr lease = memory_.lease(Category::gathered, "a", 1024);
  at::Tensor tensor = at::empty({0}, at::kFloat)
                          .set_(c10::Storage(c10::Storage::use_byte_size_t(),
                                             1024, std::move(lease)),
                                0, {256}, {1});
  tensor.fill_(2);
  at::Tensor view = tensor.narrow(0, 10, 5);
  tensor.reset();
  EXPECT_EQ(view.sum().item<float>(), 10);
  EXPECT_EQ(ledger_->total_live(), 1024);
  view.reset();
  EXPECT_EQ(ledger_->total_live(), 0);
}

TEST_F(DeviceMemoryTest, WithinALeaseIsWhatTheAllocatorGave) {
  const c10::DataPtr lease = memory_.lease(Category::gathered, "a", 1024);
  const auto& theirs = base::innermost(lease);
  EXPECT_EQ(theirs.get(), lease.get());
  EXPECT_EQ(theirs.get_deleter(), c10::GetCPUAllocator()->raw_deleter());
  EXPECT_EQ(&base::innermost(theirs), &theirs);
}

TEST_F(DeviceMemoryTest, ZeroBytesGiveANullPointerAndNoEntry) {
  const c10::DataPtr lease = memory_.lease(Category::gathered, "a", 0);
  EXPECT_EQ(lease.get(), nullptr);
  EXPECT_EQ(lease.device(), memory_.runtime().device());
  EXPECT_EQ(ledger_->num_leases(Category::gathered), 0);
  EXPECT_THROW(memory_.lease(Category::gathered, "a", -1), Error);
}

TEST_F(DeviceMemoryTest, ALeaseOutlivesTheMemoryItCameFrom) {
  auto runtime = std::make_shared<device::CpuRuntime>();
  const std::weak_ptr<device::Runtime> watch = runtime;
  auto memory = std::make_unique<DeviceMemory>(std::move(runtime), ledger_);
  c10::DataPtr lease = memory->lease(Category::parameters, "a", 64);
  memory.reset();
  EXPECT_FALSE(watch.expired());
  std::thread([&] { lease.clear(); }).join();
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(ledger_->total_live(), 0);
}

class Exhausted final : public device::CpuRuntime {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "no ", bytes, " bytes left");
  }
};

class ExhaustedHost final : public device::CpuRuntime {
 public:
  c10::DataPtr allocate(std::size_t) override { throw std::bad_alloc(); }
};

std::string error_of_a_lease(std::shared_ptr<device::Runtime> runtime) {
  auto ledger = std::make_shared<Ledger>();
  DeviceMemory memory(std::move(runtime), ledger);
  std::string text;
  try {
    memory.lease(Category::gathered, "layers.3", 4096);
  } catch (const c10::OutOfMemoryError& error) {
    text = error.what_without_backtrace();
  }
  EXPECT_EQ(ledger->total_live(), 0);
  return text;
}

constexpr auto* kShortage =
    "lowtide: gathered of 'layers.3': expected 4096 bytes, got no memory for "
    "them. Save fewer activations, ";

TEST(ExhaustedMemoryTest, TheAllocatorsErrorSaysForWhomAndWhatToDo) {
  const auto text = error_of_a_lease(std::make_shared<Exhausted>());
  EXPECT_THAT(text, HasSubstr("no 4096 bytes left ("));
  EXPECT_THAT(text, HasSubstr(kShortage));
}

TEST(ExhaustedMemoryTest, ABadAllocSaysTheSame) {
  EXPECT_THAT(error_of_a_lease(std::make_shared<ExhaustedHost>()),
              HasSubstr(kShortage));
}

TEST_F(DeviceMemoryTest, AnInjectedFaultHitsOneLeaseOfThatNameAndCategory) {
  memory_.fail_next_lease(Category::gradient_stream, "layers.1");
  EXPECT_NO_THROW(memory_.lease(Category::gradient_stream, "layers.0", 8));
  EXPECT_NO_THROW(memory_.lease(Category::gathered, "layers.1", 8));
  EXPECT_THROW(memory_.lease(Category::gradient_stream, "layers.1", 8),
               c10::OutOfMemoryError);
  EXPECT_EQ(ledger_->num_leases(Category::gradient_stream), 1);
  EXPECT_NO_THROW(memory_.lease(Category::gradient_stream, "layers.1", 8));
}

TEST_F(DeviceMemoryTest, OutOfMemoryPassesThroughAndLeavesTheLedgerAlone) {
  EXPECT_ANY_THROW(
      memory_.lease(Category::gathered, "a", std::int64_t{1} << 55));
  EXPECT_EQ(ledger_->total_live(), 0);
  EXPECT_EQ(ledger_->num_leases(Category::gathered), 0);
}

TEST_F(DeviceMemoryTest, PoisonFillsFreshAndReleasedBytesWithNaN) {
  // Keeps released bytes mapped, so that they can be looked at, and allocates
  // outside of the caching that would hide a missing fill.
  class KeepingRuntime : public device::CpuRuntime {
   public:
    c10::DataPtr allocate(std::size_t bytes) override {
      kept.resize(bytes);
      return {kept.data(), device()};
    }
    std::vector<unsigned char> kept;
  };
  const auto runtime = std::make_shared<KeepingRuntime>();
  DeviceMemory memory(runtime, ledger_);
  for (const bool poison : {false, true}) {
    memory.set_poison(poison);
    const unsigned char expected = poison ? 0xFF : 1;
    runtime->kept.assign(100, 1);
    c10::DataPtr lease = memory.lease(Category::gathered, "a", 100);
    EXPECT_THAT(runtime->kept, testing::Each(expected));
    runtime->kept.assign(100, 1);
    lease.clear();
    EXPECT_THAT(runtime->kept, testing::Each(expected));
  }
}

TEST_F(DeviceMemoryTest, ObserversOfAllocationsDoNotSeeLeases) {
  std::int64_t events = 0;
  const device::AllocationObserver observer(
      "test", [&](void*, std::int64_t, c10::Device) { ++events; });
  memory_.lease(Category::gathered, "a", 4096).clear();
  EXPECT_EQ(events, 0);
  at::empty({16}).reset();
  EXPECT_EQ(events, 2);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::memory
