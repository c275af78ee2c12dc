#include "testing/scripted_runtime.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/check.h"

namespace lowtide::device {
namespace LOWTIDE_FILE {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StrEq;
using testing::ThrowsMessage;

constexpr std::size_t kBytes = 1024;

// One unit's gather, with each edge removable: the buffer is allocated on
// compute, filled on gather, used on compute, released.
enum class Edge { none, allocation_to_gather, gather_to_compute };

std::vector<std::string> gather_and_compute(ScriptedRuntime& runtime,
                                            Edge removed) {
  c10::DataPtr data = runtime.allocate(kBytes);
  const Event allocated = runtime.record(Stream::compute);
  if (removed != Edge::allocation_to_gather) {
    runtime.wait(Stream::gather, allocated);
  }
  runtime.touches(Stream::gather, data.get(), kBytes, Access::write);
  const Event gathered = runtime.record(Stream::gather);
  if (removed != Edge::gather_to_compute) {
    runtime.wait(Stream::compute, gathered);
  }
  runtime.touches(Stream::compute, data.get(), kBytes, Access::read);
  data.clear();
  return runtime.violations();
}

TEST(ScriptedRuntimeTest, EveryEdgeOfAGatherIsNeeded) {
  ScriptedRuntime clean;
  EXPECT_THAT(gather_and_compute(clean, Edge::none), IsEmpty());
  EXPECT_NO_THROW(clean.expect_clean());

  ScriptedRuntime early;
  EXPECT_THAT(gather_and_compute(early, Edge::allocation_to_gather),
              ElementsAre(HasSubstr("does not wait for its allocation")));

  ScriptedRuntime unready;  // the read races, and so does the release
  EXPECT_THAT(gather_and_compute(unready, Edge::gather_to_compute),
              ElementsAre(HasSubstr("does not wait for the write"),
                          HasSubstr("compute does not wait for")));
}

TEST(ScriptedRuntimeTest, ExpectCleanListsWhatIsBroken) {
  ScriptedRuntime runtime;
  const c10::DataPtr data = runtime.allocate(kBytes);
  runtime.touches(Stream::reduce, data.get(), kBytes, Access::write);
  EXPECT_THAT(
      [&] { runtime.expect_clean(); },
      ThrowsMessage<Error>(StrEq(
          "lowtide: scripted runtime: expected every access ordered by events, "
          "got 1 broken rule(s):\n  write on reduce (entry 1) of allocation 1 "
          "does not wait for its allocation, allocate on compute (entry 0)\n. "
          "Record an event behind the work that must come first and make the "
          "other stream wait for it")));
}

TEST(ScriptedRuntimeTest, CanThrowWhereTheRuleIsBroken) {
  ScriptedRuntime runtime({.throw_on_violation = true});
  c10::DataPtr data = runtime.allocate(kBytes);
  EXPECT_THROW(runtime.touches(Stream::reduce, data.get(), 1, Access::write),
               Error);
  EXPECT_NO_THROW(
      runtime.touches(Stream::compute, data.get(), 0, Access::read));
  data.clear();  // broken as well, but a release can not throw
  EXPECT_EQ(runtime.violations().size(), 2u);
}

TEST(ScriptedRuntimeTest, FreshAndReleasedBytesAreNaN) {
  ScriptedRuntime runtime;
  c10::DataPtr data = runtime.allocate(kBytes);
  auto* const values = static_cast<float*>(data.get());
  EXPECT_TRUE(std::isnan(values[0]));
  values[0] = 1;
  data.clear();
  EXPECT_TRUE(std::isnan(values[0]));  // still mapped: quarantined
  EXPECT_THAT(runtime.violations(), IsEmpty());
}

TEST(ScriptedRuntimeTest, AnUndeclaredWriteToReleasedBytesIsFound) {
  // In quarantine, and when leaving it.
  for (const std::size_t quarantine : {kBytes * 4, kBytes}) {
    ScriptedRuntime runtime({.quarantine_bytes = quarantine});
    c10::DataPtr data = runtime.allocate(kBytes);
    auto* const values = static_cast<float*>(data.get());
    data.clear();
    values[7] = 1;
    runtime.allocate(kBytes).clear();
    EXPECT_THAT(runtime.violations(),
                ElementsAre("an undeclared write changed 1024 released bytes"));
  }
}

TEST(ScriptedRuntimeTest, TheHostCanOrderStreams) {
  for (const bool synchronizes : {true, false}) {
    ScriptedRuntime runtime;
    c10::DataPtr data = runtime.allocate(kBytes);
    runtime.wait(Stream::wire, runtime.record(Stream::compute));
    runtime.touches(Stream::wire, data.get(), kBytes, Access::write);
    if (synchronizes) runtime.synchronize(Stream::wire);
    runtime.touches(Stream::reduce, data.get(), kBytes, Access::read);
    if (synchronizes) runtime.synchronize(Stream::reduce);
    data.clear();
    EXPECT_EQ(runtime.violations().empty(), synchronizes);
  }
}

TEST(ScriptedRuntimeTest, AnEmptyEventHasHappened) {
  ScriptedRuntime runtime;
  runtime.wait(Stream::gather, Event());
  EXPECT_THAT(runtime.log(), IsEmpty());
}

TEST(ScriptedRuntimeTest, EventsStayInTheirGraphCapture) {
  ScriptedRuntime runtime;
  runtime.set_capture(1);
  const Event inside = runtime.record(Stream::gather);
  runtime.wait(Stream::compute, inside);
  EXPECT_THAT(runtime.violations(), IsEmpty());
  for (const std::uint64_t other : {2, 0}) {
    runtime.set_capture(other);
    runtime.wait(Stream::compute, inside);
  }
  EXPECT_THAT(runtime.violations(),
              ElementsAre(HasSubstr("another graph capture"),
                          HasSubstr("another graph capture")));
}

TEST(ScriptedRuntimeTest, LogTellsWhatWasEnqueuedWhere) {
  ScriptedRuntime runtime;
  const c10::DataPtr data = runtime.allocate(kBytes);
  {
    const ScriptedRuntime::Label outer("layers.0");
    runtime.wait(Stream::gather, runtime.record(Stream::compute));
    const ScriptedRuntime::Label inner("layers.0 all-gather");
    runtime.touches(Stream::gather, data.get(), kBytes, Access::write);
  }
  runtime.mark(Stream::compute, "forward");
  std::vector<std::string> lines;
  for (const Entry& entry : runtime.log()) {
    lines.push_back(base::concat(stream_name(entry.stream), " ",
                                 entry_kind_name(entry.kind), " ", entry.name));
  }
  EXPECT_THAT(lines, ElementsAre("compute allocate ", "compute record layers.0",
                                 "gather wait layers.0",
                                 "gather write layers.0 all-gather",
                                 "compute mark forward"));
  EXPECT_THAT(runtime.entries("layers.0"), ElementsAre(1, 2));
}

// How engine tests show that a prefetch does not wait for the compute it is to
// overlap with.
TEST(ScriptedRuntimeTest, TellsWhetherAGatherWaitsForCompute) {
  for (const bool prefetch : {true, false}) {
    ScriptedRuntime runtime;
    const auto gather = [&] {
      runtime.wait(Stream::gather, runtime.record(Stream::compute));
      return runtime.mark(Stream::gather, "gather 1");
    };
    EntryId gathered = 0;
    if (prefetch) gathered = gather();
    const EntryId computed = runtime.mark(Stream::compute, "compute 0");
    if (!prefetch) gathered = gather();
    EXPECT_EQ(runtime.happens_before(computed, gathered), !prefetch);
  }
}

TEST(ScriptedRuntimeTest, DescribeNamesAnAllocation) {
  ScriptedRuntime runtime;
  const c10::DataPtr data = runtime.allocate(kBytes);
  runtime.describe(data.get(), "gathered", "layers.3");
  runtime.touches(Stream::wire, data.get(), 1, Access::write);
  EXPECT_THAT(runtime.violations(),
              ElementsAre(HasSubstr("allocation 1 'gathered of layers.3'")));
}

TEST(ScriptedRuntimeTest, ForeignMemoryIsKnownOnceAdopted) {
  ScriptedRuntime runtime;
  const at::Tensor tensor = at::zeros({16});
  runtime.touches(Stream::compute, tensor.data_ptr(), 64, Access::read);
  EXPECT_THAT(runtime.violations(),
              ElementsAre(HasSubstr("64 bytes that nobody allocated")));
  runtime.adopt(tensor.data_ptr(), 64, "gradient");
  runtime.touches(Stream::compute, tensor.data_ptr(), 64, Access::read);
  EXPECT_EQ(runtime.violations().size(), 1u);
  runtime.forget(tensor.data_ptr());
  runtime.touches(Stream::compute, tensor.data_ptr(), 64, Access::read);
  EXPECT_EQ(runtime.violations().size(), 2u);
}

TEST(ScriptedRuntimeTest, WatchesTorchsOwnAllocations) {
  for (const bool waits : {true, false}) {
    ScriptedRuntime runtime;
    const auto watch = runtime.watch_torch_allocations();
    at::Tensor gradient = at::empty({16});
    EXPECT_TRUE(std::isnan(gradient.data_ptr<float>()[3]));
    runtime.wait(Stream::reduce, runtime.record(Stream::compute));
    runtime.touches(Stream::reduce, gradient.data_ptr(), 64, Access::read);
    if (waits) runtime.wait(Stream::compute, runtime.record(Stream::reduce));
    gradient.reset();
    if (waits) {
      EXPECT_THAT(runtime.violations(), IsEmpty());
    } else {
      EXPECT_THAT(runtime.violations(),
                  ElementsAre(HasSubstr("release on compute (entry 4) of "
                                        "allocation 1 'torch'")));
    }
  }
}

TEST(ScriptedRuntimeTest, AnAllocationMayOutliveTheRuntime) {
  auto runtime = std::make_unique<ScriptedRuntime>();
  c10::DataPtr data = runtime->allocate(kBytes);
  runtime.reset();
  std::memset(data.mutable_get(), 0, kBytes);
  std::thread([&] { data.clear(); }).join();
}

TEST(ScriptedRuntimeTest, NoBytesNeedNoRules) {
  ScriptedRuntime runtime;
  EXPECT_EQ(runtime.allocate(0).get(), nullptr);
  EXPECT_THAT(runtime.log(), IsEmpty());
}

// A value goes to the host and back, with each edge removable.
enum class Copying { all, none_after_write, none_after_copy, host_too_early };

std::vector<std::string> there_and_back(Copying removed) {
  ScriptedRuntime runtime;
  c10::DataPtr value = runtime.allocate(kBytes);
  c10::DataPtr slot = runtime.allocate_pinned(kBytes);
  runtime.touches(Stream::compute, value.get(), kBytes, Access::write);
  if (removed != Copying::none_after_write) {
    runtime.wait(Stream::offload, runtime.record(Stream::compute));
  }
  runtime.copy(Stream::offload, slot.mutable_get(), value.get(), kBytes,
               Copy::to_host);
  const Event copied = runtime.record(Stream::offload);
  runtime.wait(Stream::compute, copied);
  c10::DataPtr back = runtime.allocate(kBytes);
  if (removed != Copying::none_after_copy) {
    runtime.wait(Stream::reload, runtime.record(Stream::compute));
  }
  runtime.copy(Stream::reload, back.mutable_get(), slot.get(), kBytes,
               Copy::to_device);
  runtime.wait(Stream::compute, runtime.record(Stream::reload));
  if (removed != Copying::host_too_early) {
    runtime.synchronize(Stream::offload);
    runtime.synchronize(Stream::reload);
  }
  slot.clear();
  back.clear();
  value.clear();
  return runtime.violations();
}

TEST(ScriptedRuntimeTest, EveryEdgeOfCopiesToTheHostIsNeeded) {
  EXPECT_THAT(there_and_back(Copying::all), IsEmpty());
  EXPECT_THAT(there_and_back(Copying::none_after_write),
              Contains(HasSubstr("read on offload")));
  EXPECT_THAT(there_and_back(Copying::none_after_copy),
              AllOf(Contains(HasSubstr("'pinned' does not wait for the write")),
                    Contains(HasSubstr("does not wait for its allocation"))));
  EXPECT_THAT(
      there_and_back(Copying::host_too_early),
      Contains(HasSubstr("'pinned': the host does not wait for the write")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::device
