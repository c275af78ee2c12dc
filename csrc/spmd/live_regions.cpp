#include "spmd/live_regions.h"

#include <ATen/record_function.h>

#include <algorithm>

#include "spmd/typed_collectives.h"

namespace lowtide::spmd {

void LiveRegions::add(RegionRecord& record) {
  const std::lock_guard lock(mutex_);
  records_.push_back(&record);
  if (!observation_) observation_.emplace(*this);
}

void LiveRegions::remove(RegionRecord& record) {
  const std::lock_guard lock(mutex_);
  records_.erase(std::remove(records_.begin(), records_.end(), &record),
                 records_.end());
  if (records_.empty()) observation_.reset();
}

RegionRecord* LiveRegions::open_in_this_thread() const {
  const std::uint64_t thread = at::RecordFunction::currentThreadId();
  for (auto it = records_.rbegin(); it != records_.rend(); ++it) {
    if ((*it)->is_open_ && (*it)->thread_ == thread) return *it;
  }
  return nullptr;
}

RegionRecord* LiveRegions::owner(std::uint64_t thread,
                                 std::uint64_t sequence) const {
  RegionRecord* smallest = nullptr;
  for (RegionRecord* each : records_) {
    if (!each->contains(thread, sequence)) continue;
    if (smallest == nullptr ||
        each->end_ - each->begin_ <= smallest->end_ - smallest->begin_) {
      smallest = each;
    }
  }
  return smallest;
}

void LiveRegions::collective(const comm::ObservedCall& call) {
  // The engine's own: gathers of parameters, gradients on their way out.
  if (!call.issuer.empty() && call.issuer.rfind(kTypedLabel, 0) != 0) return;
  const std::lock_guard lock(mutex_);
  if (RegionRecord* open = open_in_this_thread()) {
    const bool typed = !call.issuer.empty();
    if (typed) return;  // checked when it was called
    open->forward_calls_.push_back(
        {call, open->in_operator_ ? open->operators_.back().get() : nullptr});
    return;
  }
  if (!call.in_backward) return;
  RegionRecord* region = owner(call.node_thread, call.node_sequence);
  if (region == nullptr) return;
  RegionRecord::Sent& sent = region->sent_[call.kind];
  sent.calls += 1;
  sent.bytes += call.bytes;
  region->backward_calls_.push_back(
      {call, region->operator_of(call.node_sequence)});
}

void LiveRegions::node(std::uint64_t thread, std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  RegionRecord* region = owner(thread, sequence);
  if (region == nullptr) return;
  if (auto* op = region->operator_of(sequence)) op->executed = true;
}

LiveRegions& live_regions() {
  static LiveRegions regions;
  return regions;
}

}  // namespace lowtide::spmd
