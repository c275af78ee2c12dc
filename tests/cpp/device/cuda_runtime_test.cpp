// CudaRuntime over the dry driver, which answers for CUDA without a GPU
// (docs/design/phantom.md).  ctest preloads it: cmake/CppTests.cmake has
// the environment, with two devices, and events that are done once the host
// waits for them.
#ifdef LOWTIDE_WITH_CUDA
#include "device/cuda/cuda_runtime.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/host_uses.h"
#include "base/tensor_over.h"
#include "device/fake_sysfs.h"
#include "device/make_runtime.h"
#include "device/on_stream.h"
#include "device/stream_capture.h"

// Those that the thread may run on.
std::vector<int> allowed_cpus() {
  cpu_set_t cpus;
  EXPECT_EQ(sched_getaffinity(0, sizeof(cpus), &cpus), 0);
  std::vector<int> all;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &cpus)) all.push_back(cpu);
  }
  return all;
}

// From which CPUs the library has asked for page-locked memory last.
std::vector<int> asked_from;

extern "C" cudaError_t cudaHostAlloc(void** data, std::size_t bytes,
                                     unsigned flags) {
  asked_from = allowed_cpus();
  using Function = cudaError_t (*)(void**, std::size_t, unsigned);
  static const auto of_the_driver =
      reinterpret_cast<Function>(dlsym(RTLD_NEXT, "cudaHostAlloc"));
  return of_the_driver(data, bytes, flags);
}

namespace lowtide::device {
namespace LOWTIDE_FILE {

using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;
using c10::cuda::getDefaultCUDAStream;
using c10::cuda::getStreamFromPool;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

constexpr std::size_t kBytes = std::size_t{3} << 19;
constexpr Stream kAll[] = {Stream::compute, Stream::gather, Stream::reduce,
                           Stream::offload, Stream::reload};

c10::Device cuda(c10::DeviceIndex index) {
  return {c10::DeviceType::CUDA, index};
}

// What the driver counts.
std::int64_t driver_count(const std::string& what) {
  void* const function = dlsym(RTLD_DEFAULT, ("lowtide_dry_" + what).c_str());
  if (function == nullptr) {
    throw std::runtime_error(
        "CudaRuntimeTest: expected the dry driver, got another or none. Run "
        "`ctest -R cpp.device.cuda`, which preloads it.");
  }
  return reinterpret_cast<std::int64_t (*)()>(function)();
}

// The stream whose pool the allocator took the bytes from.
void* pool_of(const c10::DataPtr& bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.get());
  for (const auto& segment :
       c10::cuda::CUDACachingAllocator::snapshot().segments) {
    if (segment.address <= address &&
        address < segment.address + segment.total_size) {
      return segment.stream;
    }
  }
  throw std::runtime_error("CudaRuntimeTest: bytes of no segment");
}

// A graph capture that begins on a stream and ends with the scope.  A stream
// that waits for an event recorded in it joins it; any other does not.
class GraphCapture {
 public:
  explicit GraphCapture(CUDAStream origin) : origin_(origin) {
    C10_CUDA_CHECK(
        cudaStreamBeginCapture(origin_, cudaStreamCaptureModeRelaxed));
  }
  ~GraphCapture() {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(origin_, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;

 private:
  CUDAStream origin_;
};

class CudaRuntimeTest : public testing::Test {
 protected:
  static CudaRuntime over_the_driver() {
    driver_count("host_waits");
    return CudaRuntime(c10::Device(c10::DeviceType::CUDA));
  }

  void TearDown() override {
    EXPECT_EQ(getCurrentCUDAStream(), user_);
    EXPECT_EQ(runtime_.current(), Stream::compute);
  }

  CUDAStream inside(Stream stream) {
    const StreamScope scope(runtime_, stream);
    return getCurrentCUDAStream();
  }

  // Which streams a capture has.
  std::vector<Stream> captured() {
    std::vector<Stream> joined;
    for (const Stream stream : kAll) {
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      C10_CUDA_CHECK(cudaStreamIsCapturing(inside(stream), &status));
      if (status != cudaStreamCaptureStatusNone) joined.push_back(stream);
    }
    return joined;
  }

  bool reached(const Event& stamp) {
    return runtime_.elapsed_ns(stamp, stamp).has_value();
  }

  CudaRuntime runtime_ = over_the_driver();
  const CUDAStream user_ = getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard_{user_};
};

TEST_F(CudaRuntimeTest, MakeRuntimeMakesItForADeviceAndForTheCurrentOne) {
  for (const c10::DeviceIndex index : {0, 1}) {
    const c10::cuda::CUDAGuard current(index);
    for (const c10::Device device : {cuda(index), cuda(-1)}) {
      const auto runtime = make_runtime(device);
      EXPECT_EQ(runtime->device(), cuda(index));
      EXPECT_NE(dynamic_cast<CudaRuntime*>(runtime.get()), nullptr);
    }
  }
}

TEST_F(CudaRuntimeTest, CommunicationHasUrgentStreamsCopiesHaveOthers) {
  EXPECT_EQ(inside(Stream::compute), user_);
  EXPECT_EQ(inside(Stream::gather).priority(), -1);
  EXPECT_EQ(inside(Stream::reduce).priority(), -1);
  EXPECT_EQ(inside(Stream::offload).priority(), 0);
  EXPECT_EQ(inside(Stream::reload).priority(), 0);
  std::set<cudaStream_t> streams{getDefaultCUDAStream()};
  for (const Stream stream : kAll) streams.insert(inside(stream));
  EXPECT_EQ(streams.size(), 1 + std::size(kAll));
}

TEST_F(CudaRuntimeTest, ComputeIsTheUsersStreamInNestedScopes) {
  const CUDAStream reduce_stream = inside(Stream::reduce);
  CudaRuntime of_another_root(runtime_.device());
  const StreamScope gather(runtime_, Stream::gather);
  EXPECT_NE(getCurrentCUDAStream(), user_);
  EXPECT_EQ(inside(Stream::compute), user_);
  const StreamScope compute(of_another_root, Stream::compute);
  EXPECT_EQ(getCurrentCUDAStream(), user_);
  EXPECT_EQ(runtime_.current(), Stream::compute);
  const StreamScope reduce(runtime_, Stream::reduce);
  EXPECT_EQ(getCurrentCUDAStream(), reduce_stream);
  const StreamScope offload(runtime_, Stream::offload);
  EXPECT_EQ(inside(Stream::compute), user_);
}

TEST_F(CudaRuntimeTest, TheUserMayMoveToAnotherStreamBetweenScopes) {
  const CUDAStream moved_to = getStreamFromPool();
  const c10::cuda::CUDAStreamGuard moved(moved_to);
  const StreamScope gather(runtime_, Stream::gather);
  EXPECT_EQ(inside(Stream::compute), moved_to);
}

TEST_F(CudaRuntimeTest, ScopesAreOfTheThread) {
  const StreamScope gather(runtime_, Stream::gather);
  Stream elsewhere = Stream::reduce;
  std::optional<CUDAStream> before;
  std::optional<CUDAStream> compute;
  std::thread([&] {
    elsewhere = runtime_.current();
    before = getCurrentCUDAStream();
    compute = inside(Stream::compute);
  }).join();
  EXPECT_EQ(elsewhere, Stream::compute);
  EXPECT_EQ(before, getDefaultCUDAStream());
  EXPECT_EQ(compute, before);
}

TEST_F(CudaRuntimeTest, ScopesAreOfTheDevice) {
  CudaRuntime second(cuda(1));
  const CUDAStream user_of_second = getCurrentCUDAStream(1);
  const CUDAStream gather_stream = inside(Stream::gather);
  {
    const StreamScope gather(runtime_, Stream::gather);
    EXPECT_EQ(second.current(), Stream::compute);
    const StreamScope reduce(second, Stream::reduce);
    EXPECT_EQ(second.current(), Stream::reduce);
    EXPECT_EQ(runtime_.current(), Stream::gather);
    EXPECT_EQ(getCurrentCUDAStream(), gather_stream);
    EXPECT_EQ(inside(Stream::compute), user_);
    const c10::DataPtr bytes = second.allocate(kBytes);
    EXPECT_EQ(bytes.device(), cuda(1));
    EXPECT_EQ(pool_of(bytes), user_of_second.stream());
    EXPECT_EQ(c10::cuda::current_device(), 0);
    const StreamScope compute(second, Stream::compute);
    EXPECT_EQ(getCurrentCUDAStream(1), user_of_second);
  }
  EXPECT_EQ(getCurrentCUDAStream(1), user_of_second);
}

TEST_F(CudaRuntimeTest, BytesComeFromTheComputeStreamInEveryScope) {
  for (const Stream stream : kAll) {
    const StreamScope scope(runtime_, stream);
    const CUDAStream current = getCurrentCUDAStream();
    const c10::DataPtr bytes = runtime_.allocate(kBytes);
    EXPECT_EQ(bytes.device(), runtime_.device());
    EXPECT_EQ(pool_of(bytes), user_.stream());
    EXPECT_EQ(getCurrentCUDAStream(), current);
  }
}

// A block that another stream was said to use would wait for the host.
TEST_F(CudaRuntimeTest, ReleasedBytesServeAtOnceWhateverStreamUsedThem) {
  const c10::DataPtr host = runtime_.allocate_pinned(kBytes);
  c10::DataPtr bytes = runtime_.allocate(kBytes);
  const void* const first = bytes.get();
  runtime_.copy(Stream::reload, bytes.get(), host.get(), kBytes,
                Copy::to_device);
  runtime_.copy(Stream::offload, host.get(), bytes.get(), kBytes,
                Copy::to_host);
  bytes.clear();
  const StreamScope gather(runtime_, Stream::gather);
  EXPECT_EQ(runtime_.allocate(kBytes).get(), first);
}

// Their own stream waits for what the one that is current when they die has
// enqueued: it is part of the capture again, which could not end otherwise.
TEST_F(CudaRuntimeTest, BytesThatDieOnAnotherStreamComeHomeBehindItsWork) {
  const c10::DataPtr host = runtime_.allocate_pinned(kBytes);
  c10::DataPtr bytes = runtime_.allocate(kBytes);
  const GraphCapture capture(user_);
  const Event begin = runtime_.record(Stream::compute);
  const c10::cuda::CUDAStreamGuard aside(getStreamFromPool());
  runtime_.wait(Stream::compute, begin);
  runtime_.copy(Stream::compute, host.get(), bytes.get(), kBytes,
                Copy::to_host);
  bytes.clear();
}

TEST_F(CudaRuntimeTest, BytesThatDieInACaptureDoNotBringTheirStreamIntoIt) {
  c10::DataPtr bytes = runtime_.allocate(kBytes);
  const CUDAStream aside = getStreamFromPool();
  const GraphCapture capture(aside);
  {
    const c10::cuda::CUDAStreamGuard moved(aside);
    bytes.clear();
  }
  EXPECT_THAT(captured(), IsEmpty());
}

TEST_F(CudaRuntimeTest, BytesThatDiedWaitForTheStreamsThatWereRecorded) {
  const auto waits = [](const void* address) {
    for (const auto& segment :
         c10::cuda::CUDACachingAllocator::snapshot().segments) {
      auto begin = segment.address;
      for (const auto& block : segment.blocks) {
        if (begin == reinterpret_cast<std::uintptr_t>(address)) {
          return block.active && !block.allocated;
        }
        begin += block.size;
      }
    }
    return false;
  };
  for (const bool recorded : {false, true}) {
    auto bytes = runtime_.allocate(kBytes);
    void* const address = bytes.get();
    auto tensor = base::tensor_over(
        base::owning_storage(std::move(bytes), kBytes), at::kByte,
        {static_cast<std::int64_t>(kBytes)}, {1}, 0);
    if (recorded) tensor.record_stream(getStreamFromPool().unwrap());
    tensor.reset();
    EXPECT_EQ(waits(address), recorded);
  }
}

// Which streams copies of torch's used these bytes on.
using Users = std::vector<c10::Stream>;

void forget(void* /*users*/) {}

const base::HostUses kUsers(&forget, [](void* users, c10::Stream stream) {
  static_cast<Users*>(users)->push_back(stream);
});

TEST_F(CudaRuntimeTest, WhoLeasesHostBytesIsToldOfTorchsCopies) {
  Users users;
  const c10::DataPtr pinned = runtime_.allocate_pinned(kBytes);
  const auto tensor = [](c10::DataPtr bytes) {
    return base::tensor_over(base::owning_storage(std::move(bytes), kBytes),
                             at::kByte, {static_cast<std::int64_t>(kBytes)},
                             {1}, 0);
  };
  at::Tensor host = tensor(
      {pinned.get(), &users, &forget, c10::Device(c10::DeviceType::CPU)});
  at::Tensor there = tensor(runtime_.allocate(kBytes));
  const CUDAStream side = getStreamFromPool();
  {
    const c10::cuda::CUDAStreamGuard moved(side);
    there.narrow(0, 1, 1).copy_(host.narrow(0, 1, 1), true);
  }
  host.copy_(there, /*non_blocking=*/true);
  EXPECT_THAT(users, ElementsAre(side.unwrap(), user_.unwrap()));
  users.clear();
  host.copy_(there);
  there.copy_(host);
  there.copy_(there.clone(), /*non_blocking=*/true);
  host.copy_(host.clone(), /*non_blocking=*/true);
  EXPECT_THAT(users, IsEmpty());
}

TEST_F(CudaRuntimeTest, WhatRunsOnAnotherStreamIsJoinedAtBothEnds) {
  const CUDAStream aside = getStreamFromPool();
  {
    const GraphCapture capture(user_);
    const Event begin = runtime_.record(Stream::compute);
    {
      const c10::cuda::CUDAStreamGuard moved(aside);
      runtime_.wait(Stream::compute, begin);
    }
    run_on(runtime_, aside.unwrap(), [&] {
      EXPECT_EQ(getCurrentCUDAStream(), aside);
      runtime_.record(Stream::compute);
    });
    EXPECT_EQ(getCurrentCUDAStream(), user_);
  }
  // Not across the border of a capture, and not without a stream.
  const GraphCapture capture(user_);
  for (const auto& stream :
       {std::optional(aside.unwrap()), std::optional<c10::Stream>()}) {
    run_on(runtime_, stream, [&] { EXPECT_EQ(getCurrentCUDAStream(), user_); });
  }
}

// Where the thread may run on two CPUs at least.
TEST_F(CudaRuntimeTest, PageLockedBytesAreAskedForNearTheDevice) {
  const auto all = allowed_cpus();
  char address[] = "00000000:00:00.0";
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(address, sizeof(address), 0));
  const FakeSysfs sysfs(address);
  sysfs.write_cpus(std::to_string(all.back()) + "\n");
  CudaRuntime near(runtime_.device(), sysfs.root());
  EXPECT_NE(near.allocate_pinned(kBytes).get(), nullptr);
  EXPECT_THAT(asked_from, ElementsAre(all.back()));
  EXPECT_EQ(allowed_cpus(), all);
}

TEST_F(CudaRuntimeTest, PageLockedBytesAreAsManyAsAsked) {
  // More than any other test of the program has at a time.
  constexpr std::size_t kMany = (std::size_t{40} << 20) + 12;
  const c10::DataPtr bytes = runtime_.allocate_pinned(kMany);
  EXPECT_TRUE(bytes.device().is_cpu());
  EXPECT_EQ(driver_count("peak_pinned"), kMany);
}

TEST_F(CudaRuntimeTest, CopiesAreWorkOfTheStreamTheyAreFor) {
  const c10::DataPtr host = runtime_.allocate_pinned(kBytes);
  const c10::DataPtr bytes = runtime_.allocate(kBytes);
  for (const Stream stream : kAll) {
    const GraphCapture capture(inside(stream));
    for (const Stream copying : kAll) {
      const auto outside = driver_count("stray");
      runtime_.copy(copying, host.get(), bytes.get(), kBytes, Copy::to_host);
      EXPECT_EQ(driver_count("stray"), outside + (copying == stream ? 0 : 1));
    }
  }
}

TEST_F(CudaRuntimeTest, WaitsAreForTheStreamAnEventWasRecordedOn) {
  for (const Stream recorded : kAll) {
    for (const Stream waiting : kAll) {
      if (recorded == waiting) continue;
      const GraphCapture capture(inside(recorded));
      EXPECT_THAT(captured(), ElementsAre(recorded));
      const Event done = runtime_.record(recorded);
      const Event copy = done;
      runtime_.wait(waiting, Event());
      EXPECT_THAT(captured(), ElementsAre(recorded));
      runtime_.wait(waiting, copy);
      EXPECT_THAT(captured(), UnorderedElementsAre(recorded, waiting));
      runtime_.wait(recorded, runtime_.record(waiting));
    }
  }
  EXPECT_THAT(captured(), IsEmpty());
}

TEST_F(CudaRuntimeTest, EventsAreUsedAgain) {
  runtime_.record(Stream::gather);
  const auto made = driver_count("events_made");
  for (const Stream stream : kAll) runtime_.record(stream);
  EXPECT_EQ(driver_count("events_made"), made);
  const Event held = runtime_.record(Stream::gather);
  const Event copy = held;
  EXPECT_EQ(driver_count("events_made"), made);
  runtime_.record(Stream::gather);
  EXPECT_EQ(driver_count("events_made"), made + 1);
}

TEST_F(CudaRuntimeTest, TheHostWaitsForOneStreamWhereItIsAsked) {
  for (const Stream stream : kAll) {
    const StreamScope gather(runtime_, Stream::gather);
    std::vector<Event> stamps;
    for (const Stream one : kAll) stamps.push_back(runtime_.record_time(one));
    const auto waits = driver_count("host_waits");
    for (const Event& stamp : stamps) EXPECT_FALSE(reached(stamp));
    EXPECT_EQ(driver_count("host_waits"), waits);
    runtime_.synchronize(stream);
    EXPECT_EQ(driver_count("host_waits"), waits + 1);
    for (std::size_t i = 0; i < stamps.size(); ++i) {
      EXPECT_EQ(reached(stamps[i]), kAll[i] == stream);
    }
  }
}

TEST_F(CudaRuntimeTest, TimeStampsTellTheDevicesTimeOnceBothAreReached) {
  for (const bool first_is_early : {true, false}) {
    const Event from = runtime_.record_time(Stream::gather);
    const Event to = runtime_.record_time(Stream::reduce);
    EXPECT_EQ(runtime_.elapsed_ns(from, to), std::nullopt);
    runtime_.synchronize(first_is_early ? Stream::gather : Stream::reduce);
    EXPECT_EQ(runtime_.elapsed_ns(from, to), std::nullopt);
    runtime_.synchronize(first_is_early ? Stream::reduce : Stream::gather);
    // The driver says a millisecond of any two events.
    EXPECT_EQ(runtime_.elapsed_ns(from, to), 1'000'000);
  }
}

TEST_F(CudaRuntimeTest, EventsAreAskedForBesideACaptureInTheirDevicesContext) {
  const auto captured = getStreamFromPool(false, 1);
  const auto beside = getStreamFromPool(false, 1);
  c10::Event event(c10::DeviceType::CUDA);
  event.record(beside.unwrap());
  const GraphCapture capture(captured);
  EXPECT_TRUE(is_capturing(captured.unwrap()));
  EXPECT_FALSE(is_capturing(beside.unwrap()));
  const auto mode_now = [] {
    auto mode = cudaStreamCaptureModeGlobal;
    EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    auto same = mode;
    EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&same), cudaSuccess);
    return mode;
  };
  std::thread([&] {
    {
      const AsksForEvents asks(cuda(1));
      EXPECT_EQ(c10::cuda::current_device(), 1);
      EXPECT_EQ(mode_now(), cudaStreamCaptureModeRelaxed);
      EXPECT_FALSE(event.query());
    }
    EXPECT_EQ(mode_now(), cudaStreamCaptureModeGlobal);
  }).join();
}

TEST_F(CudaRuntimeTest, ACaptureIsOfTheCurrentStreamAndHasNoTime) {
  EXPECT_EQ(runtime_.capture(), 0U);
  std::uint64_t first = 0;
  {
    const GraphCapture capture(user_);
    first = runtime_.capture();
    EXPECT_NE(first, 0U);
    EXPECT_TRUE(runtime_.record_time(Stream::compute).empty());
    const StreamScope gather(runtime_, Stream::gather);  // has not joined
    EXPECT_EQ(runtime_.capture(), 0U);
  }
  {
    const GraphCapture capture(user_);
    EXPECT_NE(runtime_.capture(), 0U);
    EXPECT_NE(runtime_.capture(), first);
  }
  EXPECT_EQ(runtime_.capture(), 0U);
  EXPECT_FALSE(runtime_.record_time(Stream::compute).empty());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::device
#endif
