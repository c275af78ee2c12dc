#include "phantom/observer/replay.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <map>
#include <span>
#include <vector>

#define LOWTIDE_DRY_API __attribute__((visibility("default")))

namespace lowtide::dry {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using RequestKind = AllocatorRequest::Kind;
using Requests = std::span<const AllocatorRequest>;
using Streams = std::map<std::int64_t, c10::cuda::CUDAStream>;

// Of this process, in the order of those that they stand for: the allocator
// looks through its blocks in it.
Streams streams_of(Requests requests) {
  Streams streams;
  for (const auto& request : requests) {
    streams.try_emplace(request.stream, c10::cuda::getDefaultCUDAStream(0));
  }
  for (auto& [number, stream] : streams) {
    if (number == 0) continue;
    cudaStream_t made = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    stream = c10::cuda::getStreamFromExternal(made, 0);
  }
  return streams;
}

void ask(Requests requests) {
  const auto streams = streams_of(requests);
  std::vector<c10::DataPtr> blocks;
  for (const auto& request : requests) {
    const auto& stream = streams.at(request.stream);
    const auto id = static_cast<std::size_t>(request.id);
    switch (request.kind) {
      case RequestKind::kAllocate: {
        const c10::cuda::CUDAStreamGuard guard(stream);
        blocks.push_back(allocator::get()->allocate(
            static_cast<std::size_t>(request.bytes)));
        break;
      }
      case RequestKind::kRecord:
        allocator::recordStream(blocks[id], stream);
        break;
      case RequestKind::kFree:
        blocks[id].clear();
        break;
      case RequestKind::kWaitStream:
        stream.synchronize();
        break;
      case RequestKind::kWaitDevice:
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        break;
      case RequestKind::kEmptyCache:
        allocator::emptyCache();
        break;
      default:
        TORCH_INTERNAL_ASSERT(false);
    }
  }
}

}  // namespace
}  // namespace lowtide::dry

using namespace lowtide::dry;

extern "C" {

// In a process that has asked CUDA's allocator for nothing else on device 0.
LOWTIDE_DRY_API ReplayAnswer
lowtide_dry_replay(const AllocatorRequest* requests, std::int64_t count) {
  ReplayAnswer answer;
  try {
    ask({requests, static_cast<std::size_t>(count)});
  } catch (const c10::OutOfMemoryError&) {
    answer.fits = 0;
  }
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  answer.peak_reserved = stats.reserved_bytes[0].peak;
  answer.retries = stats.num_alloc_retries;
  return answer;
}

}  // extern "C"
