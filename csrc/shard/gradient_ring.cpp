#include "shard/gradient_ring.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "shard/storage.h"

namespace lowtide::shard {

using device::Stream;

std::int64_t GradientRing::bytes_for(std::int64_t budget_bytes,
                                     std::int64_t largest_unit_bytes) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  if (largest_unit_bytes <= kMiB) {
    return std::min(budget_bytes, kNumSlots * 2 * kMiB);
  }
  return std::min(budget_bytes, std::max(2 * kMiB, largest_unit_bytes / 4));
}

// A slot is [N + 1, columns]: what is reduced and this rank's result.
std::int64_t GradientRing::bytes_of_equal_chunks(std::int64_t ring_bytes,
                                                 std::int64_t wire_bytes,
                                                 std::int64_t world_size,
                                                 std::int64_t row_bytes) {
  const auto slots = num_slots(world_size);
  const auto of_a_rank = wire_bytes / world_size;
  const auto in_slot =
      std::max<std::int64_t>(1, ring_bytes / (slots * (world_size + 1)));
  const auto chunks = std::max(slots, (of_a_rank + in_slot / 2) / in_slot);
  return slots * (world_size + 1) * (of_a_rank / chunks + row_bytes);
}

GradientRing::GradientRing(std::string root,
                           std::shared_ptr<memory::DeviceMemory> memory)
    : root_(std::move(root)),
      memory_(std::move(memory)),
      slots_(static_cast<std::size_t>(kNumSlots)) {}

void GradientRing::fit(std::int64_t slot_bytes) {
  slot_bytes_ = std::max(slot_bytes_, slot_bytes);
}

const c10::Storage& GradientRing::slot(std::size_t i, std::int64_t bytes) {
  const auto wanted = std::max(slot_bytes_, bytes);
  auto& storage = slots_.at(i);
  const auto there = storage ? static_cast<std::int64_t>(storage.nbytes()) : 0;
  if (there > 0 && there < wanted) {
    // Its bytes are to serve the longer one.
    catch_up_compute();
    storage = c10::Storage();
  } else if (there > wanted) {
    retire({std::exchange(storage, {})}, there);
  }
  if (!storage) {
    storage = owning_storage(
        memory_->lease(memory::Category::gradient_stream, root_, wanted),
        wanted);
    compute_has_moved();
  }
  return storage;
}

void GradientRing::drop_slots() {
  catch_up_compute();
  std::fill(slots_.begin(), slots_.end(), c10::Storage());
}

void GradientRing::retire(std::vector<c10::Storage> storages,
                          std::int64_t bytes) {
  auto used = memory_->runtime().record(Stream::reduce);
  if (used.empty() || storages.empty()) {
    return;
  }
  retired_bytes_ += bytes;
  retired_.push_back({std::move(storages), std::move(used), bytes});
}

void GradientRing::reclaim(std::int64_t keep_bytes) {
  auto kept = retired_.begin();
  for (; retired_bytes_ > keep_bytes; ++kept) {
    retired_bytes_ -= kept->bytes;
  }
  if (kept != retired_.begin()) {
    // The newest of them: `reduce` runs in order.
    memory_->runtime().wait(Stream::compute, std::prev(kept)->used);
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
  drop_slots();
  reduce_behind_ = false;
  slot_bytes_ = 0;
}

}  // namespace lowtide::shard
