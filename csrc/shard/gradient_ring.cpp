#include "shard/gradient_ring.h"

#include <algorithm>
#include <iterator>

#include "shard/storage.h"

namespace lowtide::shard {

using device::Stream;

std::int64_t GradientRing::bytes_for(std::int64_t budget_bytes,
                                     std::int64_t largest_unit_bytes) {
  constexpr std::int64_t kSmallest = std::int64_t{2} << 20;
  return std::min(budget_bytes, std::max(kSmallest, largest_unit_bytes / 4));
}

GradientRing::GradientRing(std::string root,
                           std::shared_ptr<memory::DeviceMemory> memory)
    : root_(std::move(root)),
      memory_(std::move(memory)),
      slots_(static_cast<std::size_t>(kNumSlots)) {}

void GradientRing::fit(std::int64_t slot_bytes) {
  slot_bytes_ = std::max(slot_bytes_, slot_bytes);
}

const c10::Storage& GradientRing::slot(std::size_t i) {
  auto& storage = slots_.at(i);
  // A unit that nobody expected may need more than the others.
  if (storage && static_cast<std::int64_t>(storage.nbytes()) < slot_bytes_) {
    catch_up_compute();
    storage = c10::Storage();
  }
  if (!storage) {
    storage = owning_storage(
        memory_->lease(memory::Category::gradient_stream, root_, slot_bytes_),
        slot_bytes_);
    compute_has_moved();
  }
  return storage;
}

void GradientRing::retire(at::Tensor source, std::int64_t budget_bytes) {
  auto& runtime = memory_->runtime();
  auto copied = runtime.record(Stream::reduce);
  if (copied.empty()) {
    return;
  }
  const auto bytes = static_cast<std::int64_t>(source.nbytes());
  retired_bytes_ += bytes;
  retired_.push_back({std::move(source), std::move(copied), bytes});
  reclaim(budget_bytes);
}

void GradientRing::reclaim(std::int64_t keep_bytes) {
  auto kept = retired_.begin();
  for (; retired_bytes_ > keep_bytes; ++kept) {
    retired_bytes_ -= kept->bytes;
  }
  if (kept != retired_.begin()) {
    // The newest of them: `reduce` runs in order.
    memory_->runtime().wait(Stream::compute, std::prev(kept)->copied);
    retired_.erase(retired_.begin(), kept);
  }
}

void GradientRing::catch_up_reduce() {
  auto& runtime = memory_->runtime();
  if (reduce_behind_) {
    runtime.wait(Stream::reduce, runtime.record(Stream::compute));
  }
  reduce_behind_ = false;
  compute_behind_ = true;  // by the work that follows
}

void GradientRing::catch_up_compute() {
  auto& runtime = memory_->runtime();
  if (compute_behind_) {
    runtime.wait(Stream::compute, runtime.record(Stream::reduce));
  }
  compute_behind_ = false;
  retired_.clear();
  retired_bytes_ = 0;
}

void GradientRing::release() {
  catch_up_compute();
  reduce_behind_ = false;
  std::fill(slots_.begin(), slots_.end(), c10::Storage());
  slot_bytes_ = 0;
}

}  // namespace lowtide::shard
