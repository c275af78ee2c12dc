#include "memory/host_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include "base/check.h"
#include "base/host_uses.h"
#include "testing/scripted_runtime.h"

namespace lowtide::memory {
namespace LOWTIDE_FILE {

using device::Stream;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::int64_t kBytes = 1000;
constexpr auto kGradients = Category::sharded_gradients;

class HostMemoryTest : public testing::Test {
 protected:
  std::shared_ptr<HostMemory> make(bool page_locked) {
    return std::make_shared<HostMemory>(runtime_, pool_, page_locked);
  }
  std::int64_t live() const {
    return ledger_->live()[static_cast<std::size_t>(kGradients)];
  }

  std::shared_ptr<device::ScriptedRuntime> runtime_ =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  std::shared_ptr<PinnedPool> pool_ = std::make_shared<PinnedPool>(
      runtime_, ledger_, std::numeric_limits<std::int64_t>::max());
  std::shared_ptr<HostMemory> host_ = make(/*page_locked=*/true);
};

TEST_F(HostMemoryTest, BytesGivenBackDuringACopyServeNobodyBeforeItIsOver) {
  auto device = runtime_->allocate(kBytes);
  runtime_->touches(Stream::compute, device.get(), kBytes,
                    device::Access::write);
  auto bytes = host_->lease(kGradients, "unit", kBytes);
  void* const first = bytes.get();
  host_->to_host(first, device.get(), kBytes);
  bytes.clear();
  auto others = host_->lease(kGradients, "unit", kBytes);
  EXPECT_NE(others.get(), first);
  host_->wait();
  EXPECT_EQ(live(), kBytes);
  EXPECT_EQ(host_->lease(kGradients, "unit", kBytes).get(), first);
  EXPECT_EQ(pool_->figures().num_registrations, 2);
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(HostMemoryTest, TheHostWaitsOnlyForCopies) {
  const auto waits = [&] {
    std::size_t count = 0;
    for (const auto& entry : runtime_->log()) {
      count += entry.kind == device::Entry::Kind::synchronize ? 1 : 0;
    }
    return count;
  };
  auto device = runtime_->allocate(kBytes);
  auto bytes = host_->lease(kGradients, "unit", kBytes);
  host_->wait();
  EXPECT_EQ(waits(), 0u);
  host_->to_device(device.mutable_get(), bytes.get(), kBytes);
  host_->wait();
  EXPECT_EQ(waits(), 1u);
  host_->wait();
  EXPECT_EQ(waits(), 1u);
}

// Of a program's own, on a stream that nothing of ours waits for.
TEST_F(HostMemoryTest, BytesThatACopyOfTorchsReadsAreWrittenBehindIt) {
  constexpr auto kSide = Stream::gather;
  const c10::Stream side(c10::Stream::UNSAFE, runtime_->device(),
                         static_cast<c10::StreamId>(kSide));
  auto device = runtime_->allocate(kBytes);
  runtime_->touches(Stream::compute, device.get(), kBytes,
                    device::Access::write);
  auto bytes = host_->lease(kGradients, "unit", kBytes);
  host_->to_host(bytes.mutable_get(), device.get(), kBytes);
  host_->wait();
  void* const first = bytes.get();
  runtime_->touches(kSide, first, kBytes, device::Access::read);
  base::note_use(bytes, side);
  bytes.clear();
  bytes = host_->lease(kGradients, "unit", kBytes);
  ASSERT_EQ(bytes.get(), first);
  host_->to_host(first, device.get(), kBytes);
  EXPECT_THAT(runtime_->violations(), IsEmpty());

  // Dropped while a copy of ours runs, too.
  host_->wait();
  auto others = host_->lease(kGradients, "others", kBytes);
  host_->to_host(others.mutable_get(), device.get(), kBytes);
  runtime_->touches(kSide, first, kBytes, device::Access::read);
  base::note_use(bytes, side);
  bytes.clear();
  host_->wait();
  bytes = host_->lease(kGradients, "unit", kBytes);
  ASSERT_EQ(bytes.get(), first);
  host_->to_host(first, device.get(), kBytes);
  EXPECT_THAT(runtime_->violations(), IsEmpty());

  // Nothing leads out of a capture: they are kept until it is over.
  host_->wait();
  runtime_->touches(kSide, first, kBytes, device::Access::read);
  base::note_use(bytes, side);
  bytes.clear();
  runtime_->set_capture(1);
  EXPECT_NE(host_->lease(kGradients, "unit", kBytes).get(), first);
  host_->wait();
  runtime_->set_capture(0);
  bytes = host_->lease(kGradients, "unit", kBytes);
  ASSERT_EQ(bytes.get(), first);
  host_->to_host(first, device.get(), kBytes);
  EXPECT_THAT(runtime_->violations(), IsEmpty());

  // Parameters are written by the host: here on no stream at all.
  host_->wait();
  const auto read = runtime_->mark(kSide, "read");
  base::note_use(bytes, side);
  bytes.clear();
  bytes = host_->lease(Category::parameters, "unit", kBytes);
  ASSERT_EQ(bytes.get(), first);
  const auto host = runtime_->mark(Stream::reload, "the host's");
  EXPECT_TRUE(runtime_->happens_before(read, host));
}

TEST_F(HostMemoryTest, OrdinaryBytesAreCountedAndNotPageLocked) {
  host_ = make(/*page_locked=*/false);
  auto bytes = host_->lease(Category::parameters, "unit", kBytes);
  EXPECT_TRUE(HostMemory::leased(bytes));
  EXPECT_EQ(ledger_->by_name(Category::parameters).at("unit").live, kBytes);
  EXPECT_EQ(pool_->figures().pinned_bytes, 0);
  EXPECT_EQ(pool_->figures().pageable_bytes, kBytes);
  bytes.clear();
  EXPECT_EQ(ledger_->total_live(), 0);
  EXPECT_FALSE(HostMemory::leased(runtime_->allocate(kBytes)));
}

TEST_F(HostMemoryTest, AGraphCaptureIsRefused) {
  auto device = runtime_->allocate(kBytes);
  auto bytes = host_->lease(kGradients, "unit", kBytes);
  runtime_->set_capture(1);
  EXPECT_THAT(
      [&] { host_->to_device(device.mutable_get(), bytes.get(), kBytes); },
      testing::ThrowsMessage<Error>(HasSubstr("without a graph")));
  runtime_->set_capture(0);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::memory
