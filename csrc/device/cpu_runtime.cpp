#include "device/cpu_runtime.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>

#include "base/check.h"

namespace lowtide::device {
namespace {

thread_local Stream thread_stream = Stream::compute;

}  // namespace

c10::Device CpuRuntime::device() const {
  return c10::Device(c10::DeviceType::CPU);
}

c10::DataPtr CpuRuntime::allocate(std::size_t bytes) {
  return c10::GetCPUAllocator()->allocate(bytes);
}

c10::DataPtr CpuRuntime::allocate_pinned(std::size_t bytes) {
  void* const data = c10::alloc_cpu(bytes);
  return {data, data, &c10::free_cpu, device()};
}

void CpuRuntime::copy(Stream /*stream*/, void* to, const void* from,
                      std::size_t bytes, Copy /*direction*/) {
  std::memcpy(to, from, bytes);
}

Event CpuRuntime::record(Stream /*stream*/) { return {}; }

void CpuRuntime::wait(Stream /*stream*/, const Event& /*event*/) {}

void CpuRuntime::synchronize(Stream /*stream*/) {}

std::int64_t CpuRuntime::enter(Stream stream) {
  LOWTIDE_INVARIANT(stream != Stream::wire,
                    "only a process group runs on the wire stream");
  const auto previous = static_cast<std::int64_t>(thread_stream);
  thread_stream = stream;
  return previous;
}

void CpuRuntime::leave(std::int64_t previous) {
  thread_stream = static_cast<Stream>(previous);
}

Stream CpuRuntime::current() const { return thread_stream; }

}  // namespace lowtide::device
