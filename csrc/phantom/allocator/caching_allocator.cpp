#include "phantom/allocator/caching_allocator.h"

#include <mutex>
#include <utility>

#include "phantom/allocator/allocator_state.h"

namespace lowtide::phantom {

CachingAllocator::CachingAllocator(AllocatorSettings settings,
                                   std::unique_ptr<EventSource> events,
                                   std::unique_ptr<SegmentProvider> segments)
    : state_(std::make_unique<State>(settings, std::move(events),
                                     std::move(segments))) {}

CachingAllocator::~CachingAllocator() = default;

Address CachingAllocator::malloc(std::size_t bytes, StreamId stream) {
  const std::lock_guard lock(mutex_);
  return bytes == 0 ? 0 : state_->malloc(bytes, stream);
}

void CachingAllocator::free(Address address) {
  const std::lock_guard lock(mutex_);
  if (address != 0) state_->free(address);
}

void CachingAllocator::record_stream(Address address, StreamId stream) {
  const std::lock_guard lock(mutex_);
  if (address != 0) state_->record_stream(address, stream);
}

void CachingAllocator::synchronize(std::optional<StreamId> stream) {
  const std::lock_guard lock(mutex_);
  state_->synchronize(stream);
}

void CachingAllocator::empty_cache() {
  const std::lock_guard lock(mutex_);
  state_->empty_cache();
}

AllocatorSettings CachingAllocator::settings() const {
  const std::lock_guard lock(mutex_);
  return state_->settings;
}

void CachingAllocator::set_expandable(bool expandable) {
  const std::lock_guard lock(mutex_);
  state_->settings.expandable = expandable;
}

void CachingAllocator::set_memory_fraction(double fraction) {
  const std::lock_guard lock(mutex_);
  state_->set_memory_fraction(fraction);
}

std::size_t CachingAllocator::allocated() const {
  const std::lock_guard lock(mutex_);
  return state_->statistics.allocated_bytes[kAll].current;
}

std::size_t CachingAllocator::reserved() const {
  const std::lock_guard lock(mutex_);
  return state_->statistics.reserved_bytes[kAll].current;
}

Statistics CachingAllocator::statistics() const {
  const std::lock_guard lock(mutex_);
  return state_->statistics;
}

void CachingAllocator::reset_peak_statistics() {
  const std::lock_guard lock(mutex_);
  state_->statistics.reset_peaks();
}

void CachingAllocator::reset_accumulated_statistics() {
  const std::lock_guard lock(mutex_);
  state_->statistics.reset_accumulated();
}

std::size_t CachingAllocator::block_size(Address address) const {
  const std::lock_guard lock(mutex_);
  return state_->allocated_block(address)->size;
}

std::vector<SegmentInfo> CachingAllocator::snapshot() const {
  const std::lock_guard lock(mutex_);
  return state_->snapshot();
}

void CachingAllocator::observe(Observer observer) {
  const std::lock_guard lock(mutex_);
  state_->observer = std::move(observer);
}

void CachingAllocator::record_history(std::size_t max_entries) {
  const std::lock_guard lock(mutex_);
  state_->history = History(max_entries);
}

std::vector<TraceEntry> CachingAllocator::history() const {
  const std::lock_guard lock(mutex_);
  return state_->history.entries();
}

}  // namespace lowtide::phantom
