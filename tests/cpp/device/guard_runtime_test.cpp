// GuardRuntime over a device made up here: streams are numbers, and a log says
// what was asked of it.  No backend is registered as PrivateUse1 in this
// program otherwise.
#include "device/guard_runtime.h"

#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "device/make_runtime.h"

namespace lowtide::device {
namespace {

using testing::ElementsAre;
using testing::StrEq;
using testing::ThrowsMessage;

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

thread_local c10::StreamId current_id = 0;

// Of the one test that runs.
struct Log {
  std::vector<std::string> calls;
  c10::StreamId next_stream = 1;
  bool hands_out_one_stream = false;
  int live_events = 0;
  bool events_reached = false;
};
Log* log_of_test = nullptr;

c10::Stream stream(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override {
    return stream(current_id);
  }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int priority) const override {
    note("new stream, priority", priority);
    if (log_of_test->hands_out_one_stream) return stream(1);
    return stream(log_of_test->next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(std::exchange(current_id, to.id()));
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    ++log_of_test->live_events;
    if (flag == c10::EventFlag::BACKEND_DEFAULT) note("time stamp on", on.id());
    *event = std::make_unique<c10::StreamId>(on.id()).release();
  }
  void block(void* event, const c10::Stream& waiting) const override {
    note(std::to_string(waiting.id()) + " waits for",
         *static_cast<c10::StreamId*>(event));
  }
  bool queryEvent(void*) const override { return log_of_test->events_reached; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    return 1.5;  // ms
  }
  void destroyEvent(void* event,
                    const c10::DeviceIndex) const noexcept override {
    --log_of_test->live_events;
    const std::unique_ptr<c10::StreamId> owned(
        static_cast<c10::StreamId*>(event));
  }
  void synchronizeStream(const c10::Stream& on) const override {
    note("host waits for", on.id());
  }

 private:
  static void note(const std::string& what, c10::StreamId id) {
    log_of_test->calls.push_back(what + " " + std::to_string(id));
  }
};

class FakeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    log_of_test->calls.push_back("allocate on " + std::to_string(current_id));
    auto data = c10::GetCPUAllocator()->allocate(bytes);
    void* const address = data.get();
    const auto deleter = data.get_deleter();
    return {address, data.release_context(), deleter, kDevice};
  }
  void copy_data(void*, const void*, std::size_t) const override {}
};

class GuardRuntimeTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    static FakeAllocator allocator;
    c10::SetAllocator(kDevice.type(), &allocator);
    static FakeGuard guard;
    c10::impl::registerDeviceGuard(kDevice.type(), &guard);
  }
  static void TearDownTestSuite() {
    c10::impl::registerDeviceGuard(kDevice.type(), nullptr);
  }
  void SetUp() override { log_of_test = &log_; }
  void TearDown() override {
    EXPECT_EQ(current_id, 0);
    EXPECT_EQ(log_.live_events, 0);
  }

  Log log_;
};

TEST_F(GuardRuntimeTest, PrivateUse1HasOne) {
  const auto runtime = make_runtime(c10::Device(c10::DeviceType::PrivateUse1));
  EXPECT_EQ(runtime->device(), kDevice);
}

TEST_F(GuardRuntimeTest, CommunicationHasUrgentStreamsCopiesHaveOthers) {
  GuardRuntime runtime(kDevice);
  EXPECT_THAT(log_.calls,
              ElementsAre("new stream, priority -1", "new stream, priority -1",
                          "new stream, priority 0", "new stream, priority 0"));
  std::vector<c10::StreamId> ids;
  for (const Stream one : {Stream::compute, Stream::gather, Stream::reduce}) {
    const StreamScope scope(runtime, one);
    ids.push_back(current_id);
    EXPECT_EQ(runtime.current(), one);
  }
  EXPECT_THAT(ids, ElementsAre(0, 1, 2));
}

TEST_F(GuardRuntimeTest, ABackendWithOneStreamIsRefused) {
  log_.hands_out_one_stream = true;
  EXPECT_THAT(
      [] { GuardRuntime runtime(kDevice); },
      ThrowsMessage<Error>(StrEq(
          "lowtide: device: expected two new streams beside the default one, "
          "got streams 1 and 1 of privateuseone:0. Communication needs streams "
          "of its own: the backend of this device has to hand out different "
          "ones.")));
}

TEST_F(GuardRuntimeTest, BytesComeFromTheComputeStreamInEveryScope) {
  GuardRuntime runtime(kDevice);
  log_.calls.clear();
  current_id = 7;
  {
    const StreamScope gather(runtime, Stream::gather);
    const auto bytes = runtime.allocate(64);
    EXPECT_EQ(bytes.device(), kDevice);
    EXPECT_EQ(current_id, 1);
    const StreamScope reduce(runtime, Stream::reduce);
    const auto more = runtime.allocate(64);
  }
  EXPECT_EQ(current_id, 7);
  EXPECT_THAT(log_.calls, ElementsAre("allocate on 7", "allocate on 7"));
  current_id = 0;
}

TEST_F(GuardRuntimeTest, WaitsAreForTheStreamAnEventWasRecordedOn) {
  GuardRuntime runtime(kDevice);
  log_.calls.clear();
  {
    const Event done = runtime.record(Stream::gather);
    const Event copy = done;
    EXPECT_EQ(log_.live_events, 1);
    runtime.wait(Stream::compute, done);
    runtime.wait(Stream::reduce, copy);
    runtime.wait(Stream::reduce, Event());
    runtime.synchronize(Stream::reduce);
  }
  EXPECT_THAT(log_.calls, ElementsAre("0 waits for 1", "2 waits for 1",
                                      "host waits for 2"));
}

TEST_F(GuardRuntimeTest, TimeStampsTellTheDevicesTimeOnceReached) {
  GuardRuntime runtime(kDevice);
  log_.calls.clear();
  {
    const Event from = runtime.record_time(Stream::compute);
    const Event to = runtime.record_time(Stream::compute);
    EXPECT_EQ(runtime.elapsed_ns(from, to), std::nullopt);
    log_.events_reached = true;
    EXPECT_EQ(runtime.elapsed_ns(from, to), 1'500'000);
    runtime.record(Stream::compute);
  }
  EXPECT_THAT(log_.calls, ElementsAre("time stamp on 0", "time stamp on 0"));
}

TEST_F(GuardRuntimeTest, ComputeIsTheUsersStreamInNestedScopes) {
  GuardRuntime runtime(kDevice);
  current_id = 9;
  {
    const StreamScope gather(runtime, Stream::gather);
    const StreamScope compute(runtime, Stream::compute);
    EXPECT_EQ(current_id, 9);
    EXPECT_EQ(runtime.current(), Stream::compute);
    const StreamScope reduce(runtime, Stream::reduce);
    EXPECT_EQ(current_id, 2);
  }
  EXPECT_EQ(current_id, 9);
  current_id = 0;
}

TEST_F(GuardRuntimeTest, ScopesAreOfTheThread) {
  GuardRuntime runtime(kDevice);
  const StreamScope gather(runtime, Stream::gather);
  Stream elsewhere = Stream::reduce;
  c10::StreamId id = -1;
  std::thread([&] {
    elsewhere = runtime.current();
    id = current_id;
  }).join();
  EXPECT_EQ(elsewhere, Stream::compute);
  EXPECT_EQ(id, 0);
}

}  // namespace
}  // namespace lowtide::device
