// CUDACachingAllocator of torch 2.11 for one device, as a model: the same
// sizes, pools, splits, merges, retries, statistics and history, without a
// device and without torch.
//
// Not modelled: private pools (CUDA graphs, MemPool), memory shared between
// processes, the cudaMallocAsync backend.
//
// Thread-safe: every method takes the allocator's lock.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "phantom/allocator/events.h"
#include "phantom/allocator/out_of_memory.h"
#include "phantom/allocator/segments.h"
#include "phantom/allocator/settings.h"
#include "phantom/allocator/snapshot.h"
#include "phantom/allocator/statistics.h"

namespace lowtide::phantom {

class CachingAllocator {
 public:
  // Throws lowtide::InvalidArgument for settings that torch refuses.
  explicit CachingAllocator(
      AllocatorSettings settings,
      std::unique_ptr<EventSource> events = immediate_events(),
      std::unique_ptr<SegmentProvider> segments = numbered_segments());
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  // The address of at least `bytes` for work on `stream`; 0 for 0 bytes.
  // Throws OutOfMemory; the state is then that after the cache was flushed.
  Address malloc(std::size_t bytes, StreamId stream = 0);
  // `address` as malloc returned it, once; 0 does nothing.  Throws
  // lowtide::InvalidArgument for any other address.
  void free(Address address);
  // The block is also used on `stream`: freed, it waits for an event there.
  void record_stream(Address address, StreamId stream);

  // The host waited for `stream`, or with none for the device.
  void synchronize(std::optional<StreamId> stream = std::nullopt);
  // Completes every event, then returns all unused segments and pages.
  void empty_cache();

  AllocatorSettings settings() const;
  // Both may change while blocks are live, as in torch.
  void set_expandable(bool expandable);
  void set_memory_fraction(double fraction);

  std::size_t allocated() const;  // bytes held by the program, rounded
  std::size_t reserved() const;   // bytes taken from the device
  Statistics statistics() const;
  void reset_peak_statistics();
  void reset_accumulated_statistics();

  // Bytes the block at `address` really has (>= those asked for).
  std::size_t block_size(Address address) const;
  std::vector<SegmentInfo> snapshot() const;  // by address

  // Called for every entry of the history, in order, under the lock: it must
  // not call the allocator.  An empty function removes it.
  using Observer = std::function<void(const TraceEntry&)>;
  void observe(Observer observer);

  // Keeps the last `max_entries` entries from now on; 0 stops and forgets.
  void record_history(std::size_t max_entries);
  std::vector<TraceEntry> history() const;

 private:
  class State;
  mutable std::mutex mutex_;
  std::unique_ptr<State> state_;
};

}  // namespace lowtide::phantom
