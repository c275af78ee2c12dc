// A contiguous part of a segment, and the free ones by size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include "phantom/allocator/events.h"
#include "phantom/allocator/segments.h"

namespace lowtide::phantom {

struct BlockPool;
class ExpandableSegment;

struct Block {
  StreamId stream = 0;
  std::size_t size = 0;  // bytes
  Address address = 0;
  BlockPool* pool = nullptr;
  ExpandableSegment* expandable = nullptr;  // none: an ordinary segment
  Block* prev = nullptr;                    // neighbours in the segment
  Block* next = nullptr;
  std::size_t requested_size = 0;
  bool allocated = false;
  bool mapped = true;  // false: addresses of an expandable segment only
  int num_events = 0;  // that must complete before the block is free
  std::set<StreamId> other_streams{};  // that use it, besides `stream`
  std::int64_t pool_searches = 0;      // of its pool, when it became free

  bool is_split() const { return prev != nullptr || next != nullptr; }
  bool is_free() const { return !allocated && num_events == 0; }
  // Puts this block between two neighbours, either of which may be none.
  void insert_between(Block* before, Block* after);
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const;
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const;
};

struct BlockPool {
  bool is_small = false;
  std::set<Block*, BySize> free{};
  std::set<Block*, ByAddress> unmapped{};
  std::int64_t searches = 0;  // counted only while garbage is collected

  void insert_free(Block* block);
  std::int64_t age(const Block& block) const;
};

// Owns all blocks; their addresses stay.
class BlockStore {
 public:
  Block* create();
  void destroy(Block* block);

 private:
  std::deque<Block> blocks_;
  std::vector<Block*> spare_;
};

// `block` takes in its neighbour if that is free and as mapped as itself.
// Returns the bytes added.
std::size_t merge(BlockStore& store, Block* block, Block* neighbour);

}  // namespace lowtide::phantom
