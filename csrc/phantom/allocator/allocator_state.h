// What CachingAllocator does, without its lock.  The rules are those of
// c10/cuda/CUDACachingAllocator.cpp (torch 2.11); the order in which blocks
// are tried, split and given back decides what is reserved, so it is the same.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "phantom/allocator/block.h"
#include "phantom/allocator/caching_allocator.h"
#include "phantom/allocator/device_bytes.h"
#include "phantom/allocator/expandable_segment.h"
#include "phantom/allocator/history.h"
#include "phantom/allocator/pending_frees.h"

namespace lowtide::phantom {

class CachingAllocator::State {
 public:
  State(AllocatorSettings settings, std::unique_ptr<EventSource> events,
        std::unique_ptr<SegmentProvider> segments);

  Address malloc(std::size_t bytes, StreamId stream);
  void free(Address address);
  void record_stream(Address address, StreamId stream);
  void synchronize(std::optional<StreamId> stream);
  void empty_cache();
  std::vector<SegmentInfo> snapshot() const;

  Block* allocated_block(Address address) const;  // throws InvalidArgument
  void set_memory_fraction(double fraction);

  AllocatorSettings settings;
  Statistics statistics;
  Observer observer;
  mutable History history{0};  // a snapshot is an entry too

 private:
  struct Request {
    std::size_t bytes;    // as asked for
    std::size_t block;    // rounded
    std::size_t segment;  // reserved, if nothing cached fits
    StreamId stream;
    BlockPool* pool;
  };

  // A request's way: a cached block, else a new segment; then its split.
  Block* take_cached(const Request& request);
  Block* take_new(const Request& request);
  Block* grow(const Request& request, bool after_flush);
  Block* new_segment(const Request& request);
  Block* split_and_hand_out(const Request& request, Block* block);
  bool should_split(const Request& request, const Block& block) const;
  // A new block of the same stream, pool and segment, without neighbours.
  Block* part_of(const Block& whole, Address address, std::size_t size);
  [[noreturn]] void throw_out_of_memory(const Request& request);

  // Expandable segments.
  Block* grow_expandable(const Request& request);
  Block* expandable_candidate(const Request& request);
  bool map(Block* block, std::size_t bytes);
  void unmap(Block* block);
  void destroy_expandable(Block* block);

  // The way back.
  void make_free(Block* block);
  void release_cached();
  void release_pool(BlockPool& pool);
  void release_segment(Block* block);
  bool release_oversize(const Request& request);
  void collect_garbage();

  std::vector<Block*> head_blocks() const;
  SegmentInfo segment_info(const Block* head) const;

  bool collects_garbage() const;
  bool oversize(std::size_t bytes) const;
  std::size_t max_split() const;

  void emit(TraceEntry::Action action, Address address, std::size_t size,
            StreamId stream) const;

  std::unique_ptr<EventSource> events_;
  std::unique_ptr<SegmentProvider> segments_;
  DeviceBytes device_;
  std::list<ExpandableSegment> expandable_;
  BlockStore blocks_;
  BlockPool small_{.is_small = true};
  BlockPool large_{.is_small = false};
  std::unordered_set<Block*> active_;  // allocated or waiting for events
  std::unordered_map<Address, Block*> allocated_;
  PendingFrees pending_;
};

// Adds to, or takes from, "all" and the block's own pool.
void increase(PoolStats& stats, const BlockPool& pool, std::size_t amount);
void decrease(PoolStats& stats, const BlockPool& pool, std::size_t amount);

}  // namespace lowtide::phantom
