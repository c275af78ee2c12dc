#include "phantom/allocator/snapshot.h"

#include <algorithm>

#include "phantom/allocator/allocator_state.h"

namespace lowtide::phantom {

std::string_view name_of(BlockState state) {
  switch (state) {
    case BlockState::allocated:
      return "active_allocated";
    case BlockState::pending_free:
      return "active_pending_free";
    case BlockState::inactive:
      return "inactive";
  }
  return "";
}

std::string_view name_of(TraceEntry::Action action) {
  switch (action) {
    case TraceEntry::Action::alloc:
      return "alloc";
    case TraceEntry::Action::free_requested:
      return "free_requested";
    case TraceEntry::Action::free_completed:
      return "free_completed";
    case TraceEntry::Action::segment_alloc:
      return "segment_alloc";
    case TraceEntry::Action::segment_free:
      return "segment_free";
    case TraceEntry::Action::segment_map:
      return "segment_map";
    case TraceEntry::Action::segment_unmap:
      return "segment_unmap";
    case TraceEntry::Action::snapshot:
      return "snapshot";
    case TraceEntry::Action::oom:
      return "oom";
    case TraceEntry::Action::record_stream:
      return "record_stream";
    case TraceEntry::Action::synchronize_stream:
      return "synchronize_stream";
    case TraceEntry::Action::synchronize_device:
      return "synchronize_device";
    case TraceEntry::Action::empty_cache:
      return "empty_cache";
  }
  return "";
}

namespace {

BlockState state_of(const Block& block) {
  if (block.allocated) return BlockState::allocated;
  return block.is_free() ? BlockState::inactive : BlockState::pending_free;
}

}  // namespace

// The first mapped block of each contiguous mapped range.
std::vector<Block*> CachingAllocator::State::head_blocks() const {
  std::vector<Block*> heads;
  const auto visit = [&](const auto& blocks) {
    for (Block* block : blocks) {
      if (!block->prev || !block->prev->mapped) heads.push_back(block);
    }
  };
  visit(small_.free);
  visit(large_.free);
  visit(active_);
  return heads;
}

SegmentInfo CachingAllocator::State::segment_info(const Block* head) const {
  SegmentInfo info{
      .address = head->address,
      .stream = head->stream,
      .is_large = !head->pool->is_small,
      .is_expandable = head->expandable != nullptr,
  };
  for (const Block* b = head; b && b->mapped; b = b->next) {
    const BlockState state = state_of(*b);
    const bool active = state != BlockState::inactive;
    info.blocks.push_back({.address = b->address,
                           .size = b->size,
                           .requested_size = active ? b->requested_size : 0,
                           .state = state});
    info.total_size += b->size;
    if (b->allocated) info.allocated_size += b->size;
    if (active) {
      info.active_size += b->size;
      info.requested_size += b->requested_size;
    }
  }
  return info;
}

std::vector<SegmentInfo> CachingAllocator::State::snapshot() const {
  std::vector<SegmentInfo> segments;
  std::size_t active = 0;
  for (const Block* head : head_blocks()) {
    segments.push_back(segment_info(head));
    active += segments.back().active_size;
  }
  std::ranges::sort(segments, {}, &SegmentInfo::address);
  emit(TraceEntry::Action::snapshot, 0, active, 0);
  return segments;
}

}  // namespace lowtide::phantom
