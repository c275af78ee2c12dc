// A block's life: found, split, handed out, freed, merged.
#include "phantom/allocator/allocator_state.h"

#include <cstdint>
#include <limits>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "phantom/allocator/rounding.h"

namespace lowtide::phantom {

void increase(PoolStats& stats, const BlockPool& pool, std::size_t amount) {
  stats[kAll].increase(amount);
  stats[pool.is_small ? kSmallPool : kLargePool].increase(amount);
}

void decrease(PoolStats& stats, const BlockPool& pool, std::size_t amount) {
  stats[kAll].decrease(amount);
  stats[pool.is_small ? kSmallPool : kLargePool].decrease(amount);
}

using Action = TraceEntry::Action;

CachingAllocator::State::State(AllocatorSettings settings,
                               std::unique_ptr<EventSource> events,
                               std::unique_ptr<SegmentProvider> segments)
    : settings(settings),
      events_(std::move(events)),
      segments_(std::move(segments)),
      device_(settings.capacity) {
  check_settings(settings);
  if (settings.max_split) {
    statistics.max_split_size = static_cast<std::int64_t>(*settings.max_split);
  }
}

Address CachingAllocator::State::malloc(std::size_t bytes, StreamId stream) {
  pending_.finish_done(*events_, [this](Block* block) { make_free(block); });
  const std::size_t block = rounded_size(settings, bytes);
  const Request request{
      .bytes = bytes,
      .block = block,
      .segment = segment_size(settings, block),
      .stream = stream,
      .pool = block <= kMaxSmall ? &small_ : &large_,
  };
  Block* found = take_cached(request);
  if (!found) found = take_new(request);
  if (!found) throw_out_of_memory(request);
  return split_and_hand_out(request, found)->address;
}

void CachingAllocator::State::free(Address address) {
  Block* block = allocated_block(address);
  allocated_.erase(address);
  block->allocated = false;
  decrease(statistics.allocation, *block->pool, 1);
  decrease(statistics.allocated_bytes, *block->pool, block->size);
  emit(Action::free_requested, block->address, block->requested_size,
       block->stream);
  if (oversize(block->size)) statistics.oversize_allocations.decrease(1);
  if (block->other_streams.empty()) {
    make_free(block);
  } else {
    pending_.add(block, *events_);
  }
}

void CachingAllocator::State::record_stream(Address address, StreamId stream) {
  Block* block = allocated_block(address);
  if (stream == block->stream) return;
  block->other_streams.insert(stream);
  emit(Action::record_stream, address, block->requested_size, stream);
}

void CachingAllocator::State::synchronize(std::optional<StreamId> stream) {
  events_->synchronized(stream);
  emit(stream ? Action::synchronize_stream : Action::synchronize_device, 0, 0,
       stream.value_or(0));
}

void CachingAllocator::State::set_memory_fraction(double fraction) {
  AllocatorSettings changed = settings;
  changed.memory_fraction = fraction;
  check_settings(changed);
  settings = changed;
}

Block* CachingAllocator::State::allocated_block(Address address) const {
  const auto found = allocated_.find(address);
  if (found == allocated_.end()) {
    std::ostringstream got;
    got << "0x" << std::hex << address;
    throw InvalidArgument(
        base::error_text("allocator", "the address of a live allocation",
                         got.str(), "Free what malloc returned, once."));
  }
  return found->second;
}

Block* CachingAllocator::State::take_cached(const Request& request) {
  BlockPool& pool = *request.pool;
  if (collects_garbage()) ++pool.searches;
  Block key{.stream = request.stream, .size = request.block};
  auto found = pool.free.lower_bound(&key);
  const auto of_stream = [&](auto place) {
    return place != pool.free.end() && (*place)->stream == request.stream;
  };
  if (!of_stream(found)) return nullptr;

  if ((*found)->expandable && settings.expandable) {
    // A block counts with what it can grow to: prefer the one that leaves the
    // larger range of addresses whole.
    const auto reach = [](const Block* block) {
      const Block* next = block->next;
      return block->size + (next && !next->mapped ? next->size : 0);
    };
    for (auto next = std::next(found);
         (*found)->expandable && of_stream(next) &&
         reach(*next) < reach(*found);
         ++next) {
      found = next;
    }
  } else if ((*found)->expandable) {
    // Switched off meanwhile: only ordinary segments will do.
    do {
      ++found;
    } while (of_stream(found) && (*found)->expandable);
    if (!of_stream(found)) return nullptr;
  }

  const std::size_t size = (*found)->size;
  const std::size_t rounding =
      settings.max_non_split_rounding.value_or(settings.large_segment);
  if (oversize(request.block) ? size >= request.block + rounding
                              : oversize(size)) {
    return nullptr;
  }
  Block* block = *found;
  pool.free.erase(found);
  return block;
}

bool CachingAllocator::State::should_split(const Request& request,
                                           const Block& block) const {
  const std::size_t rest = block.size - request.block;
  if (block.pool->is_small || settings.expandable) return rest >= kMinBlock;
  return !oversize(request.block) && rest > kMaxSmall;
}

Block* CachingAllocator::State::part_of(const Block& whole, Address address,
                                        std::size_t size) {
  Block* part = blocks_.create();
  part->stream = whole.stream;
  part->pool = whole.pool;
  part->expandable = whole.expandable;
  part->address = address;
  part->size = size;
  return part;
}

Block* CachingAllocator::State::split_and_hand_out(const Request& request,
                                                   Block* block) {
  BlockPool& pool = *request.pool;
  const bool was_split = block->is_split();
  const bool counts_splits = !block->expandable;
  if (should_split(request, *block)) {
    Block* rest = block;
    block = part_of(*rest, rest->address, request.block);
    block->insert_between(rest->prev, rest);
    rest->address += request.block;
    rest->size -= request.block;
    pool.insert_free(rest);
    if (was_split && counts_splits) {
      decrease(statistics.inactive_split_bytes, pool, block->size);
    } else if (counts_splits) {
      increase(statistics.inactive_split_bytes, pool, rest->size);
      increase(statistics.inactive_split, pool, 1);
    }
  } else if (was_split && counts_splits) {
    decrease(statistics.inactive_split_bytes, pool, block->size);
    decrease(statistics.inactive_split, pool, 1);
  }

  block->allocated = true;
  block->requested_size = request.bytes;
  allocated_[block->address] = block;
  active_.insert(block);
  emit(Action::alloc, block->address, request.bytes, block->stream);
  increase(statistics.allocation, pool, 1);
  increase(statistics.allocated_bytes, pool, block->size);
  increase(statistics.active, pool, 1);
  increase(statistics.active_bytes, pool, block->size);
  increase(statistics.requested_bytes, pool, request.bytes);
  if (oversize(block->size)) statistics.oversize_allocations.increase(1);
  return block;
}

void CachingAllocator::State::make_free(Block* block) {
  BlockPool& pool = *block->pool;
  emit(Action::free_completed, block->address, block->requested_size,
       block->stream);
  const std::size_t size = block->size;
  const std::size_t requested = block->requested_size;

  std::int64_t split_blocks = 0;
  std::int64_t split_bytes = 0;
  for (Block* neighbour : {block->prev, block->next}) {
    if (const std::size_t added = merge(blocks_, block, neighbour)) {
      --split_blocks;
      split_bytes -= static_cast<std::int64_t>(added);
    }
  }
  active_.erase(block);
  pool.insert_free(block);
  if (block->is_split()) {
    ++split_blocks;
    split_bytes += static_cast<std::int64_t>(block->size);
  }

  const auto change = [&](PoolStats& stats, std::int64_t amount) {
    if (amount > 0) increase(stats, pool, amount);
    if (amount < 0) decrease(stats, pool, -amount);
  };
  if (!block->expandable) {
    change(statistics.inactive_split, split_blocks);
    change(statistics.inactive_split_bytes, split_bytes);
  }
  decrease(statistics.active, pool, 1);
  decrease(statistics.active_bytes, pool, size);
  decrease(statistics.requested_bytes, pool, requested);
}

void CachingAllocator::State::throw_out_of_memory(const Request& request) {
  const std::size_t capacity = settings.capacity.value_or(0);
  emit(Action::oom, capacity - device_.taken(), request.block, request.stream);
  ++statistics.num_ooms;
  throw OutOfMemory({
      .requested = request.bytes,
      .needed = request.segment,
      .limit = allowed_bytes(settings).value_or(capacity),
      .allocated =
          static_cast<std::size_t>(statistics.allocated_bytes[kAll].current),
      .reserved =
          static_cast<std::size_t>(statistics.reserved_bytes[kAll].current),
  });
}

bool CachingAllocator::State::collects_garbage() const {
  return allowed_bytes(settings) && settings.garbage_collection_threshold > 0;
}

std::size_t CachingAllocator::State::max_split() const {
  return settings.max_split.value_or(std::numeric_limits<std::size_t>::max());
}

bool CachingAllocator::State::oversize(std::size_t bytes) const {
  return bytes >= max_split();
}

void CachingAllocator::State::emit(Action action, Address address,
                                   std::size_t size, StreamId stream) const {
  const TraceEntry entry{action, address, size, stream};
  history.add(entry);
  if (observer) observer(entry);
}

}  // namespace lowtide::phantom
