// What torch.cuda.memory_snapshot() shows, and the entries of the history.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "phantom/allocator/events.h"
#include "phantom/allocator/segments.h"

namespace lowtide::phantom {

enum class BlockState : std::uint8_t {
  allocated,     // held by the program
  pending_free,  // freed, waiting for events of other streams
  inactive,      // free
};
std::string_view name_of(BlockState state);  // torch: "active_allocated", ...

struct BlockInfo {
  Address address = 0;
  std::size_t size = 0;
  std::size_t requested_size = 0;  // 0 if inactive
  BlockState state = BlockState::inactive;
};

// One piece of device memory: contiguous, mapped, of one stream.
struct SegmentInfo {
  Address address = 0;
  std::size_t total_size = 0;
  std::size_t allocated_size = 0;
  std::size_t active_size = 0;
  std::size_t requested_size = 0;
  StreamId stream = 0;
  bool is_large = false;
  bool is_expandable = false;
  std::vector<BlockInfo> blocks{};  // by address, without gaps
};

// torch's TraceEntry, and calls that torch does not log but a replay needs.
struct TraceEntry {
  enum class Action : std::uint8_t {
    alloc,
    free_requested,
    free_completed,
    segment_alloc,
    segment_free,
    segment_map,
    segment_unmap,
    snapshot,
    oom,
    // Not in torch's history.
    record_stream,       // `stream` also uses the block at `address`
    synchronize_stream,  // the host waited for `stream`
    synchronize_device,  // the host waited for all streams
    empty_cache,         // what follows was released on request
  };
  Action action = Action::alloc;
  Address address = 0;  // oom: bytes of device memory that were free
  // alloc and free: as requested; oom: rounded; segments: reserved; snapshot:
  // active.
  std::size_t size = 0;
  StreamId stream = 0;
};
std::string_view name_of(TraceEntry::Action action);  // "free_completed", ...

}  // namespace lowtide::phantom
