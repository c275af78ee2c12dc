#include "memory/pinned_pool.h"

#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/check.h"

namespace lowtide::memory {

HostSlot& HostSlot::operator=(HostSlot&& other) {
  give_back();
  pool_ = std::move(other.pool_);
  bytes_ = std::move(other.bytes_);
  num_bytes_ = other.num_bytes_;
  category_ = other.category_;
  name_ = std::move(other.name_);
  pinned_ = other.pinned_;
  return *this;
}

HostSlot::~HostSlot() { give_back(); }

void HostSlot::set_last_use(device::Event copied) {
  bytes_.last_use = std::move(copied);
  bytes_.capture = pool_->runtime_->capture();
}

void HostSlot::wait_for_last_use(device::Stream stream) {
  auto& runtime = *pool_->runtime_;
  if (bytes_.capture == runtime.capture()) {
    runtime.wait(stream, bytes_.last_use);
  } else {  // [Note: Slots in graphs]
    runtime.wait(stream, runtime.record(device::Stream::compute));
  }
}

void HostSlot::give_back() {
  if (const auto pool = std::exchange(pool_, nullptr)) pool->give_back(*this);
}

PinnedPool::PinnedPool(std::shared_ptr<device::Runtime> runtime,
                       std::shared_ptr<Ledger> ledger, std::int64_t cap_bytes,
                       std::string holds)
    : runtime_(std::move(runtime)),
      ledger_(std::move(ledger)),
      cap_bytes_(cap_bytes),
      holds_(std::move(holds)) {
  LOWTIDE_INVARIANT(runtime_ != nullptr && ledger_ != nullptr,
                    "a pinned pool has a runtime and a ledger");
}

PinnedPool::~PinnedPool() {
  try {
    synchronize();
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: waiting for copies failed: " << error.what();
  }
}

void PinnedPool::synchronize() {
  runtime_->synchronize(device::Stream::offload);
  runtime_->synchronize(device::Stream::reload);
}

HostSlot PinnedPool::acquire(std::string_view name, std::int64_t num_bytes,
                             Category category, bool page_locked) {
  LOWTIDE_INVARIANT(num_bytes > 0, "a slot has bytes");
  HostSlot slot;
  if (page_locked) {
    const std::lock_guard lock(mutex_);
    slot.bytes_ = take_pinned(num_bytes);
  }
  slot.pinned_ = slot.bytes_.data.get() != nullptr;
  if (!slot.pinned_) slot.bytes_ = pageable(num_bytes, !page_locked);
  slot.num_bytes_ = num_bytes;
  slot.category_ = category;
  slot.name_ = name;
  ledger_->add(category, name, num_bytes);
  slot.pool_ = shared_from_this();
  return slot;
}

PinnedBytes PinnedPool::take_pinned(std::int64_t num_bytes) {
  const bool capturing = runtime_->capturing();
  std::optional<PinnedBytes> taken;
  if (capturing) taken = take_from(free_in_graphs_, num_bytes);
  if (!taken) taken = take_from(free_, num_bytes);
  if (!taken) {
    const auto fits = [&] {
      return figures_.pinned_bytes + num_bytes <= cap_bytes_;
    };
    if (!fits() && !capturing) make_room();
    taken = fits() ? register_bytes(num_bytes) : PinnedBytes{};
  }
  taken->in_graph = taken->in_graph || capturing;
  return std::move(*taken);
}

std::optional<PinnedBytes> PinnedPool::take_from(BySize& slots,
                                                 std::int64_t num_bytes) {
  const auto found = slots.find(num_bytes);
  if (found == slots.end()) return std::nullopt;
  // The one given back first: its copy is the likeliest to be over.
  PinnedBytes taken = std::move(found->second.front());
  found->second.erase(found->second.begin());
  if (found->second.empty()) slots.erase(found);
  return taken;
}

// Slots of other sizes, left from other shapes, go.
void PinnedPool::make_room() {
  if (free_.empty()) return;
  synchronize();
  for (const auto& [size, slots] : free_) {
    figures_.pinned_bytes -= size * static_cast<std::int64_t>(slots.size());
  }
  free_.clear();
}

PinnedBytes PinnedPool::register_bytes(std::int64_t num_bytes) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  PinnedBytes bytes{
      .data = runtime_->allocate_pinned(static_cast<std::size_t>(num_bytes))};
  if (bytes.data.get() != nullptr) {
    figures_.registration_ns +=
        std::chrono::nanoseconds(Clock::now() - start).count();
    figures_.num_registrations += 1;
    figures_.pinned_bytes += num_bytes;
  }
  return bytes;
}

std::string PinnedPool::shortage(std::int64_t num_bytes,
                                 const std::string& remedy) const {
  return base::error_text(
      base::concat("host memory for ", holds_),
      base::concat("at most ", cap_bytes_,
                   " page-locked bytes, and the system to give them"),
      base::concat("a request for ", num_bytes, " more"), remedy);
}

PinnedBytes PinnedPool::pageable(std::int64_t num_bytes, bool wanted) {
  if (runtime_->capturing()) {
    throw Error(shortage(
        num_bytes,
        "A graph captures no copies of pageable memory: offload less, raise "
        "LOWTIDE_PINNED_BYTES, or run the steps without a graph."));
  }
  bool report = false;
  {
    const std::lock_guard lock(mutex_);
    report = !wanted && !std::exchange(reported_, true);
    figures_.pageable_bytes += num_bytes;
    figures_.peak_pageable_bytes =
        std::max(figures_.peak_pageable_bytes, figures_.pageable_bytes);
  }
  if (report) {
    TORCH_WARN(shortage(
        num_bytes,
        "These copies use pageable memory and block the host; offload less, or "
        "raise LOWTIDE_PINNED_BYTES."));
  }
  void* data = nullptr;
  try {
    data = c10::alloc_cpu(static_cast<std::size_t>(num_bytes));
  } catch (c10::Error& error) {
    error.add_context(
        shortage(num_bytes, "Offload less, or give the machine more memory."));
    throw;
  }
  return {
      .data = {data, data, &c10::free_cpu, c10::Device(c10::DeviceType::CPU)}};
}

// Runs wherever the last reference dies, on any thread: never throws.
void PinnedPool::give_back(HostSlot& slot) {
  ledger_->remove(slot.category_, slot.name_, slot.num_bytes_);
  if (!slot.pinned_) {
    // A copy of pageable bytes is over when its call returns, but for the
    // wait of the stream before it.
    try {
      synchronize();
    } catch (const std::exception& error) {
      LOG(ERROR) << "lowtide: waiting for copies failed: " << error.what();
    }
    slot.bytes_ = {};
    const std::lock_guard lock(mutex_);
    figures_.pageable_bytes -= slot.num_bytes_;
    return;
  }
  const std::lock_guard lock(mutex_);
  auto& slots = slot.bytes_.in_graph ? free_in_graphs_ : free_;
  slots[slot.num_bytes_].push_back(std::move(slot.bytes_));
}

PinnedPool::Figures PinnedPool::figures() const {
  const std::lock_guard lock(mutex_);
  return figures_;
}

}  // namespace lowtide::memory
