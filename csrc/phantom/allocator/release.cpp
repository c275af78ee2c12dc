// Device memory goes back: on request, when it runs out, or when a share of it
// is exceeded.
#include <algorithm>

#include "base/check.h"
#include "phantom/allocator/allocator_state.h"
#include "phantom/allocator/rounding.h"

namespace lowtide::phantom {

using Action = TraceEntry::Action;

void CachingAllocator::State::empty_cache() {
  emit(Action::empty_cache, 0, 0, 0);
  release_cached();
}

void CachingAllocator::State::release_cached() {
  ++statistics.num_sync_all_streams;
  pending_.finish_all(*events_, [this](Block* block) { make_free(block); });
  release_pool(large_);
  release_pool(small_);
}

void CachingAllocator::State::release_pool(BlockPool& pool) {
  std::vector<Block*> free(pool.free.begin(), pool.free.end());
  const auto expandable = std::stable_partition(
      free.begin(), free.end(), [](const Block* b) { return !b->expandable; });
  for (auto block = free.begin(); block != expandable; ++block) {
    if (!(*block)->is_split()) release_segment(*block);
  }
  for (auto block = expandable; block != free.end(); ++block) {
    unmap(*block);
    if (!(*block)->is_split()) destroy_expandable(*block);
  }
}

void CachingAllocator::State::release_segment(Block* block) {
  BlockPool& pool = *block->pool;
  ++statistics.num_device_free;
  emit(Action::segment_free, block->address, block->size, block->stream);
  segments_->release(block->address, block->size);
  device_.give(block->size);
  events_->synchronized(std::nullopt);  // cudaFree waits for the device
  decrease(statistics.segment, pool, 1);
  decrease(statistics.reserved_bytes, pool, block->size);
  if (oversize(block->size)) statistics.oversize_segments.decrease(1);
  pool.free.erase(block);
  blocks_.destroy(block);
}

// The block keeps the part that is unmapped; what is left of its first and
// last page stays free.
void CachingAllocator::State::unmap(Block* block) {
  const PageRange pages = block->expandable->unmap(block->address, block->size);
  if (pages.size == 0) return;

  BlockPool& pool = *block->pool;
  pool.free.erase(block);
  const std::size_t before = pages.address - block->address;
  const std::size_t after = block->size - before - pages.size;
  if (before > 0) {
    Block* part = part_of(*block, block->address, before);
    part->insert_between(block->prev, block);
    pool.insert_free(part);
  }
  if (after > 0) {
    Block* part = part_of(*block, pages.address + pages.size, after);
    part->insert_between(block, block->next);
    pool.insert_free(part);
  }
  block->address = pages.address;
  block->size = pages.size;
  block->mapped = false;
  merge(blocks_, block, block->prev);
  merge(blocks_, block, block->next);
  pool.unmapped.insert(block);

  decrease(statistics.reserved_bytes, pool, pages.size);
  ++statistics.num_device_free;
  emit(Action::segment_unmap, pages.address, pages.size, block->stream);
}

void CachingAllocator::State::destroy_expandable(Block* block) {
  LOWTIDE_INVARIANT(!block->mapped && block->size == block->expandable->span(),
                    "an expandable segment is destroyed when it is empty");
  block->pool->unmapped.erase(block);
  expandable_.remove_if([&](const ExpandableSegment& segment) {
    return &segment == block->expandable;
  });
  blocks_.destroy(block);
}

// Gives back one cached block beyond max_split that is large enough for the
// request, or as many as together are, largest first.  False: not enough.
bool CachingAllocator::State::release_oversize(const Request& request) {
  if (!settings.max_split) return false;
  BlockPool& pool = *request.pool;
  const std::size_t wanted = std::max(request.block, max_split());
  Block key{.stream = request.stream, .size = wanted};
  const auto enough = pool.free.lower_bound(&key);
  if (enough != pool.free.end() && (*enough)->stream == request.stream &&
      !(*enough)->expandable) {
    release_segment(*enough);
    return true;
  }

  std::size_t released = 0;
  auto place = enough;
  while (place != pool.free.begin() && released < wanted) {
    Block* block = *--place;
    if (block->stream != request.stream || !oversize(block->size)) break;
    if (block->expandable) continue;
    released += block->size;
    ++place;  // stays valid
    release_segment(block);
  }
  return released >= wanted;
}

// Above the threshold: gives back whole cached segments that were not used for
// at least the average time, until enough is free or none is left.
void CachingAllocator::State::collect_garbage() {
  if (!collects_garbage()) return;
  const auto threshold =
      static_cast<std::size_t>(settings.garbage_collection_threshold *
                               static_cast<double>(*allowed_bytes(settings)));
  if (device_.taken() <= threshold) return;
  const std::size_t wanted = device_.taken() - threshold;

  std::vector<Block*> candidates;
  std::int64_t total_age = 0;
  for (Block* block : large_.free) {
    if (block->is_split()) continue;
    candidates.push_back(block);
    total_age += large_.age(*block);
  }
  std::size_t released = 0;
  bool found = true;
  while (released < wanted && found && !candidates.empty()) {
    const double average =
        static_cast<double>(total_age) / static_cast<double>(candidates.size());
    found = std::erase_if(candidates, [&](Block* block) {
              if (static_cast<double>(large_.age(*block)) < average)
                return false;
              released += block->size;
              total_age -= large_.age(*block);
              release_segment(block);
              return true;
            }) > 0;
  }
}

}  // namespace lowtide::phantom
