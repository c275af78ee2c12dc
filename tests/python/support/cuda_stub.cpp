// A CUDA runtime and driver without a device: enough of both for torch's own
// CUDACachingAllocator to run where there is no GPU.  Preloaded under the name
// of the driver, libcuda.so.1 (support/cuda_stub.py builds it).
//
// What it pretends:
//   - one device of CUDA_STUB_MEMORY bytes, all of them for the allocator;
//   - addresses from 2^44 on, lowest first, in steps of 2 MiB; nothing is
//   there;
//   - events: with CUDA_STUB_EVENTS=immediate complete when recorded; with
//     at_sync when the host waits for them, for a later event of their stream,
//     for their stream or for the device;
//   - cudaFree waits for the device; nothing else does;
//   - every other call succeeds and does nothing.
// cuda_stub_capture.cpp says what is refused while a stream is captured,
// cuda_stub_order.cpp what a stream comes after.
// cuda_stub_waits() tells how often the host waited for the device.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

#include "cuda_stub_capture.h"
#include "cuda_stub_order.h"

namespace {

using cuda_stub::Capture;
using cuda_stub::Order;

using Address = std::uintptr_t;

struct Event {
  cudaStream_t stream = nullptr;
  std::uint64_t ticket = 0;
  cuda_stub::Captured captured = {};
  cuda_stub::Clock clock = {};
};

class Device {
 public:
  static Device& instance() {
    static Device device;
    return device;
  }

  std::size_t memory() const { return memory_; }
  std::size_t free_memory() const { return memory_ - taken_; }

  bool take(std::size_t bytes) {
    if (bytes > free_memory()) return false;
    taken_ += bytes;
    return true;
  }
  void give(std::size_t bytes) { taken_ -= bytes; }

  Address place(std::size_t bytes) {
    Address address = kFirst;
    for (const auto& [used, size] : ranges_) {
      if (used - address >= bytes) break;
      address = used + rounded(size);
    }
    ranges_[address] = bytes;
    return address;
  }
  std::size_t forget(Address address) {
    const std::size_t bytes = ranges_.at(address);
    ranges_.erase(address);
    return bytes;
  }

  void record(Event& event, cudaStream_t stream) {
    event.stream = stream;
    event.ticket = ++last_ticket_;
  }
  bool done(const Event& event) {
    return immediate_ || event.ticket <= device_done_ ||
           event.ticket <= stream_done_[event.stream];
  }
  void wait(const Event& event) {
    auto& done = stream_done_[event.stream];
    if (done < event.ticket) done = event.ticket;
  }
  void wait_for_stream(cudaStream_t stream) {
    stream_done_[stream] = last_ticket_;
  }
  void wait_for_device() { device_done_ = last_ticket_; }

 private:
  static constexpr Address kFirst = Address{1} << 44;

  static std::size_t rounded(std::size_t bytes) {
    constexpr std::size_t kStep = std::size_t{2} << 20;
    return (bytes + kStep - 1) / kStep * kStep;
  }

  std::size_t memory_ = std::stoull(std::getenv("CUDA_STUB_MEMORY"));
  bool immediate_ = std::getenv("CUDA_STUB_EVENTS") == std::string("immediate");
  std::size_t taken_ = 0;
  std::map<Address, std::size_t> ranges_;
  std::uint64_t last_ticket_ = 0;
  std::uint64_t device_done_ = 0;
  std::map<cudaStream_t, std::uint64_t> stream_done_;
};

Device& device() { return Device::instance(); }

std::atomic<std::int64_t> waits = 0;
constexpr int kPriorities = 8;  // an H100 has 6 of them

// The driver's part, for expandable segments.

CUresult address_reserve(CUdeviceptr* address, std::size_t bytes, std::size_t,
                         CUdeviceptr, unsigned long long) {
  *address = device().place(bytes);
  return CUDA_SUCCESS;
}
CUresult address_free(CUdeviceptr address, std::size_t) {
  device().forget(address);
  return CUDA_SUCCESS;
}
// A handle is the number of its bytes.
CUresult mem_create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                    const CUmemAllocationProp*, unsigned long long) {
  if (!device().take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = bytes;
  return CUDA_SUCCESS;
}
CUresult mem_release(CUmemGenericAllocationHandle handle) {
  device().give(handle);
  return CUDA_SUCCESS;
}
// NVLink's multicast, which torch asks for before it lets NCCL allocate.
CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
  return CUDA_SUCCESS;
}
CUresult succeed() { return CUDA_SUCCESS; }

template <typename Function>
void* pointer_to(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

extern "C" {

// For programs that count them.
std::int64_t cuda_stub_waits() { return waits; }
void cuda_stub_count_wait() { ++waits; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* index) {
  *index = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "stub");
  properties->totalGlobalMem = device().memory();
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->l2CacheSize = 50 << 20;
  constexpr int kGrid[] = {2147483647, 65535, 65535};
  std::copy(std::begin(kGrid), std::end(kGrid), properties->maxGridSize);
  constexpr int kBlock[] = {1024, 1024, 64};
  std::copy(std::begin(kBlock), std::end(kBlock), properties->maxThreadsDim);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  if (const auto refused = Capture::instance().unsafe()) return refused;
  if (!device().take(bytes)) return cudaErrorMemoryAllocation;
  *address =
      bytes == 0 ? nullptr : reinterpret_cast<void*>(device().place(bytes));
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  if (address == nullptr) return cudaSuccess;
  device().give(device().forget(reinterpret_cast<Address>(address)));
  device().wait_for_device();
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = device().free_memory();
  *total = device().memory();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = 1 - kPriorities;
  return cudaSuccess;
}
// A stream's address tells its priority.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned,
                                         int priority) {
  static Address last = 4096;
  last += kPriorities;
  *stream = reinterpret_cast<cudaStream_t>(last - priority);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority =
      -static_cast<int>(reinterpret_cast<Address>(stream) % kPriorities);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++waits;
  if (const auto refused = Capture::instance().host_waits()) return refused;
  device().wait_for_stream(stream);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ++waits;
  if (const auto refused = Capture::instance().host_waits()) return refused;
  device().wait_for_device();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto& recorded = *reinterpret_cast<Event*>(event);
  Capture::instance().record(recorded.captured, stream);
  recorded.clock = Order::instance().record(stream);
  device().record(recorded, stream);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned) {
  const auto& recorded = *reinterpret_cast<Event*>(event);
  Order::instance().wait(stream, recorded.clock);
  return Capture::instance().wait(stream, recorded.captured);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto& captured = reinterpret_cast<Event*>(event)->captured;
  if (const auto refused = Capture::instance().ask(captured)) return refused;
  const bool done = device().done(*reinterpret_cast<Event*>(event));
  return done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++waits;
  const auto& captured = reinterpret_cast<Event*>(event)->captured;
  if (const auto refused = Capture::instance().ask(captured)) return refused;
  device().wait(*reinterpret_cast<Event*>(event));
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> kFunctions = {
      {"cuMemAddressReserve", pointer_to(address_reserve)},
      {"cuMemAddressFree", pointer_to(address_free)},
      {"cuMemCreate", pointer_to(mem_create)},
      {"cuMemRelease", pointer_to(mem_release)},
      {"cuDeviceGetAttribute", pointer_to(device_attribute)},
  };
  const auto found = kFunctions.find(name);
  *function = found == kFunctions.end() ? pointer_to(succeed) : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// torch asks before it makes a thread's streams current.
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

// Stands for every function that support/cuda_stub.py finds missing.
int cuda_stub_succeed() { return 0; }

}  // extern "C"
