#include "shard/gradients/gradient_ring.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

#include "shard/policy.h"
#include "shard/storage.h"

namespace lowtide::shard {

using device::Stream;

GradientRing::GradientRing(std::string root,
                           std::shared_ptr<memory::DeviceMemory> memory)
    : root_(std::move(root)),
      memory_(std::move(memory)),
      slots_(static_cast<std::size_t>(kMostRingSlots)),
      dtypes_(slots_.size(), at::ScalarType::Undefined) {}

void GradientRing::fit(std::int64_t slot_bytes) {
  slot_bytes_ = std::max(slot_bytes_, slot_bytes);
}

const c10::Storage& GradientRing::slot(std::size_t i, std::int64_t bytes,
                                       at::ScalarType dtype) {
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
    dtypes_[i] = at::ScalarType::Undefined;
  }
  if (std::exchange(dtypes_[i], dtype) != dtype) {
    zero(storage);
  }
  return storage;
}

void GradientRing::zero(const c10::Storage& slot) {
  catch_up_reduce();
  auto& runtime = memory_->runtime();
  const device::StreamScope scope(runtime, Stream::reduce);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  runtime.touches(Stream::reduce, slot.data(), slot.nbytes(),
                  device::Access::write);
  flat_view(slot, at::kByte, 0, static_cast<std::int64_t>(slot.nbytes()))
      .zero_();
}

void GradientRing::retire_slots(std::size_t i) {
  for (; i < slots_.size(); ++i) {
    if (slots_[i].use_count() == 1) {
      const auto bytes = static_cast<std::int64_t>(slots_[i].nbytes());
      retire({std::exchange(slots_[i], {})}, bytes);
    }
  }
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
  retired_.push_back({std::move(storages), std::move(used), bytes, true});
}

void GradientRing::retire(c10::Storage storage, device::Event used) {
  if (used.empty()) {
    return;
  }
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  retired_bytes_ += bytes;
  retired_.push_back({{std::move(storage)}, std::move(used), bytes, false});
}

// Either order is that of a stream: the newest of each stands for all before.
void GradientRing::wait_for_retired(std::deque<Retired>::const_iterator end,
                                    bool of_reduce) {
  while (end != retired_.cbegin()) {
    --end;
    if (!end->on_reduce || std::exchange(of_reduce, false)) {
      memory_->runtime().wait(Stream::compute, end->used);
    }
    if (!end->on_reduce) return;
  }
}

void GradientRing::reclaim(std::int64_t keep_bytes) {
  auto kept = retired_.begin();
  for (; retired_bytes_ > keep_bytes; ++kept) {
    retired_bytes_ -= kept->bytes;
  }
  if (kept != retired_.begin()) {
    wait_for_retired(kept, /*of_reduce=*/true);
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
  wait_for_retired(retired_.cend(), /*of_reduce=*/false);
  retired_.clear();
  retired_bytes_ = 0;
}

void GradientRing::release() {
  drop_slots();
  reduce_behind_ = false;
  slot_bytes_ = 0;
}

}  // namespace lowtide::shard
