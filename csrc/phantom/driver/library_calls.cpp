#include "phantom/driver/library_calls.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "phantom/driver/capture.h"
#include "phantom/driver/timekeeper.h"

namespace lowtide::dry {
namespace {

struct Streams {
  std::mutex mutex;
  std::unordered_map<std::uintptr_t, void*> of;

  static Streams& instance() {
    static Streams streams;
    return streams;
  }
};

// Handles of ours are small (device.h, new_handle), so that no half of theirs
// is lost where a number was meant.
std::uintptr_t key_of(void* handle) {
  return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(handle));
}

}  // namespace

void* stream_of_handle(void* handle) {
  auto& streams = Streams::instance();
  const std::lock_guard lock(streams.mutex);
  const auto found = streams.of.find(key_of(handle));
  return found == streams.of.end() ? nullptr : found->second;
}

}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

int lowtide_dry_set_stream(void* handle, void* stream) {
  auto& streams = Streams::instance();
  const std::lock_guard lock(streams.mutex);
  streams.of[key_of(handle)] = stream;
  return 0;
}

int lowtide_dry_computes(const char* name, void* handle) {
  const auto stream = static_cast<cudaStream_t>(stream_of_handle(handle));
  timekeeper().product(stream, name);
  capture().enqueue(stream);
  return 0;
}

}  // extern "C"
