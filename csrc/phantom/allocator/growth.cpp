// More device memory for a request that nothing cached fits.
#include <algorithm>

#include "phantom/allocator/allocator_state.h"
#include "phantom/allocator/rounding.h"

namespace lowtide::phantom {

using Action = TraceEntry::Action;

namespace {

// Addresses of one expandable segment on a device without a capacity.
constexpr std::size_t kUnlimitedSpan = std::size_t{1} << 40;

}  // namespace

Block* CachingAllocator::State::take_new(const Request& request) {
  collect_garbage();
  Block* block = grow(request, false);
  if (!block && release_oversize(request)) block = grow(request, false);
  if (!block) {
    release_cached();
    block = grow(request, true);
  }
  return block;
}

Block* CachingAllocator::State::grow(const Request& request, bool after_flush) {
  if (after_flush) ++statistics.num_alloc_retries;
  const auto allowed = allowed_bytes(settings);
  if (allowed && device_.taken() + request.segment > *allowed) return nullptr;
  return settings.expandable ? grow_expandable(request) : new_segment(request);
}

Block* CachingAllocator::State::new_segment(const Request& request) {
  if (!device_.take(request.segment)) return nullptr;
  Block* block = blocks_.create();
  block->stream = request.stream;
  block->pool = request.pool;
  block->size = request.segment;
  block->address = segments_->allocate(request.segment);
  increase(statistics.segment, *request.pool, 1);
  increase(statistics.reserved_bytes, *request.pool, request.segment);
  if (oversize(request.segment)) statistics.oversize_segments.increase(1);
  ++statistics.num_device_alloc;
  emit(Action::segment_alloc, block->address, block->size, block->stream);
  return block;
}

Block* CachingAllocator::State::grow_expandable(const Request& request) {
  Block* block = expandable_candidate(request);
  if (!block->mapped && !map(block, std::min(block->size, request.block))) {
    return nullptr;
  }
  // Free, then unmapped: each round maps more and takes in what is free.
  while (block->size < request.block) {
    Block* next = block->next;
    if (!map(next, std::min(request.block - block->size, next->size))) {
      return nullptr;
    }
    block = next;
  }
  request.pool->free.erase(block);
  return block;
}

// The lowest place with enough free and unmapped addresses in a row.
Block* CachingAllocator::State::expandable_candidate(const Request& request) {
  const auto has_room = [&](const Block* block) {
    std::size_t room = 0;
    for (; room < request.block && block && block->is_free();
         block = block->next) {
      room += block->size;
    }
    return room >= request.block;
  };
  BlockPool& pool = *request.pool;
  Block key{.stream = request.stream};
  for (auto place = pool.unmapped.lower_bound(&key);
       place != pool.unmapped.end() && (*place)->stream == request.stream;
       ++place) {
    Block* block = *place;
    if (block->prev && block->prev->is_free()) block = block->prev;
    if (has_room(block)) return block;
  }

  const std::size_t device = settings.capacity.value_or(kUnlimitedSpan);
  ExpandableSegment& segment = expandable_.emplace_back(
      *segments_, device_,
      pool.is_small ? kSmallSegment : settings.large_segment,
      device + device / 8);
  Block* block = blocks_.create();
  block->stream = request.stream;
  block->pool = &pool;
  block->expandable = &segment;
  block->address = segment.address();
  block->size = segment.span();
  block->mapped = false;
  pool.unmapped.insert(block);
  return block;
}

bool CachingAllocator::State::map(Block* block, std::size_t bytes) {
  const PageRange pages = block->expandable->map(block->address, bytes);
  if (pages.size == 0) return false;

  BlockPool& pool = *block->pool;
  pool.unmapped.erase(block);
  block->mapped = true;
  if (pages.size < block->size) {
    Block* rest =
        part_of(*block, block->address + pages.size, block->size - pages.size);
    rest->mapped = false;
    rest->insert_between(block, block->next);
    pool.unmapped.insert(rest);
    block->size = pages.size;
  }
  merge(blocks_, block, block->prev);
  merge(blocks_, block, block->next);
  pool.insert_free(block);

  increase(statistics.reserved_bytes, pool, pages.size);
  ++statistics.num_device_alloc;
  emit(Action::segment_map, pages.address, pages.size, block->stream);
  return true;
}

}  // namespace lowtide::phantom
