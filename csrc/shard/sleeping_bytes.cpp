#include "shard/sleeping_bytes.h"

#include <ATen/ceil_div.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "memory/host_memory.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

using device::Stream;

// Of a slot, where blocks are smaller: registering one takes milliseconds.
constexpr std::int64_t kSlotBytes = std::int64_t{256} << 20;
constexpr std::int64_t kAlignment = 512;

std::string asleep_error(const std::string& name) {
  return base::error_text(
      name, "one that is awake",
      "a read or a write while it sleeps: lowtide.sleep() gave its bytes back",
      "Call lowtide.wake(model, optimizer) first.");
}

std::string dropped_error(const std::string& name) {
  return base::error_text(
      name, "one that was given anew",
      "a read or a write of what lowtide.sleep(drop=...) has dropped",
      "Give it anew: lowtide.wake(model, optimizer, refill=...) for parameters "
      "and states, zero_grad() for gradients.");
}

std::optional<std::string>& read_error_of(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()
      ->get_extra_meta()
      .custom_data_ptr_error_msg_;
}

const char* address_of(const c10::Storage& storage) {
  return static_cast<const char*>(data_or_null(storage));
}

std::int64_t num_bytes_of(const c10::Storage& storage) {
  return static_cast<std::int64_t>(storage.nbytes());
}

// Torch's, that the bytes are from, or null.  What torch.load has read is, and
// has a storage that names none.
c10::Allocator* allocator_of(c10::StorageImpl& impl) {
  if (impl.received_cuda()) {
    return nullptr;
  }
  if (impl.allocator() != nullptr) {
    return impl.allocator();
  }
  auto* const torchs = c10::GetAllocator(impl.device_type());
  const auto deleter = torchs != nullptr ? torchs->raw_deleter() : nullptr;
  const auto& bytes = impl._mutable_data_ptr_no_checks();
  return deleter != nullptr && bytes.get_deleter() == deleter ? torchs
                                                              : nullptr;
}

void require_no_capture(const device::Runtime& runtime, const char* what) {
  if (runtime.capturing()) {
    throw Error(base::error_text(what, "no graph that is being captured", "one",
                                 "Call it outside of the capture."));
  }
}

}  // namespace

SleepingBytes::SleepingBytes(const std::vector<Named>& tensors,
                             std::shared_ptr<memory::DeviceMemory> memory,
                             const std::shared_ptr<memory::PinnedPool>& host)
    : memory_(std::move(memory)), dropped_(host == nullptr) {
  auto& runtime = memory_->runtime();
  require_no_capture(runtime, "sleep");
  for (const auto& named : tensors) {
    add(named);
  }
  if (!dropped_) {
    acquire(*host);
  }
  for (auto& slot : slots_) {
    slot.wait_for_last_use(Stream::offload);
  }
  runtime.wait(Stream::offload, runtime.record(Stream::compute));
  for (const auto& block : blocks_) {
    const auto& all = block.shown.front();
    if (!dropped_) {
      runtime.copy(Stream::offload, host_bytes(block), address_of(all.storage),
                   static_cast<std::size_t>(all.bytes), device::Copy::to_host);
    }
  }
  runtime.wait(Stream::compute, runtime.record(Stream::offload));
  // Whoever allocated the bytes, on whichever stream, may have them back.
  runtime.synchronize(Stream::offload);
  for (auto& block : blocks_) {
    std::for_each(block.shown.begin(), block.shown.end(),
                  [this](Shown& shown) { hide(shown); });
  }
}

bool SleepingBytes::has_bytes(const c10::Storage& storage) const {
  return storage.device() == memory_->runtime().device() &&
         data_or_null(storage) != nullptr && num_bytes_of(storage) > 0 &&
         !memory::HostMemory::leased(
             storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
}

void SleepingBytes::add(const Named& named) {
  if (!named.tensor.has_storage() || holds(named.tensor)) {
    return;
  }
  const auto& storage = named.tensor.storage();
  const auto* within = owner_of(storage);
  const auto& all = within != nullptr ? *within : storage;
  const auto found = block_of_.find(all.unsafeGetStorageImpl());
  if (found == block_of_.end()) {
    if (!has_bytes(all)) {
      return;
    }
    auto* impl = all.unsafeGetStorageImpl();
    auto asked =
        memory::DeviceMemory::asked_for(impl->_mutable_data_ptr_no_checks());
    auto* const allocator = allocator_of(*impl);
    if (!asked && allocator == nullptr) {
      throw InvalidArgument(base::error_text(
          named.name, "bytes that torch or lowtide allocated, to sleep",
          "those of another library or process",
          "Let the others go first, or leave its part awake with parts=."));
    }
    auto& block = blocks_.emplace_back();
    block.asked = std::move(asked);
    block.allocator = allocator;
    show(block, all, named.name);
    bytes_ += num_bytes_of(all);
  }
  if (within != nullptr) {
    show(blocks_[block_of_.at(all.unsafeGetStorageImpl())], storage,
         named.name);
  }
}

void SleepingBytes::show(Block& block, const c10::Storage& storage,
                         const std::string& name) {
  const auto* begin =
      address_of(block.shown.empty() ? storage : block.shown.front().storage);
  block.shown.push_back(
      {storage, name, address_of(storage) - begin, num_bytes_of(storage), {}});
  block_of_.emplace(storage.unsafeGetStorageImpl(),
                    static_cast<std::size_t>(&block - blocks_.data()));
}

void SleepingBytes::hide(Shown& shown) const {
  shown.read_error = read_error_of(shown.storage);
  set_read_error(shown.storage, dropped_ ? dropped_error(shown.name)
                                         : asleep_error(shown.name));
  hide_bytes(shown.storage);
}

void SleepingBytes::acquire(memory::PinnedPool& host) {
  std::vector<std::int64_t> sizes;
  for (auto& block : blocks_) {
    const auto bytes = at::round_up(block.shown.front().bytes, kAlignment);
    if (sizes.empty() || sizes.back() + bytes > kSlotBytes) {
      sizes.push_back(0);
    }
    block.slot = sizes.size() - 1;
    block.offset = sizes.back();
    sizes.back() += bytes;
  }
  for (const auto bytes : sizes) {
    slots_.push_back(host.acquire("asleep", bytes));
  }
}

void* SleepingBytes::host_bytes(const Block& block) const {
  return static_cast<char*>(slots_[block.slot].data()) + block.offset;
}

bool SleepingBytes::holds(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         block_of_.contains(tensor.storage().unsafeGetStorageImpl());
}

bool SleepingBytes::needed(const Block& block) {
  return std::any_of(
      block.shown.begin(), block.shown.end(),
      [](const Shown& shown) { return shown.storage.use_count() > 1; });
}

c10::DataPtr SleepingBytes::allocate(const Block& block) const {
  const auto& all = block.shown.front();
  if (block.asked) {
    return memory_->lease(block.asked->category, block.asked->name, all.bytes);
  }
  const c10::DeviceGuard guard(all.storage.device());
  return block.allocator->allocate(static_cast<std::size_t>(all.bytes));
}

void SleepingBytes::wake() {
  auto& runtime = memory_->runtime();
  require_no_capture(runtime, "wake");
  std::vector<c10::DataPtr> bytes;
  for (const auto& block : blocks_) {
    bytes.push_back(needed(block) ? allocate(block)
                                  : c10::DataPtr(nullptr, runtime.device()));
  }
  runtime.wait(Stream::reload, runtime.record(Stream::compute));
  for (std::size_t k = 0; k < blocks_.size(); ++k) {
    const auto& block = blocks_[k];
    if (bytes[k].get() == nullptr) {
      continue;
    }
    const auto& all = block.shown.front();
    if (!dropped_) {
      runtime.copy(Stream::reload, bytes[k].get(), host_bytes(block),
                   static_cast<std::size_t>(all.bytes),
                   device::Copy::to_device);
    }
    show_bytes(all.storage, std::move(bytes[k]), all.bytes);
    if (dropped_) {
      flat_view(all.storage, at::kByte, 0, all.bytes).zero_();
    }
    for (const auto& shown : block.shown) {
      if (&shown != &all) {
        show_bytes(shown.storage, bytes_within(all.storage, shown.offset),
                   shown.bytes);
      }
      read_error_of(shown.storage) = shown.read_error;
    }
  }
  const auto arrived = runtime.record(Stream::reload);
  runtime.wait(Stream::compute, arrived);
  for (auto& slot : slots_) {
    slot.set_last_use(arrived);
  }
  blocks_.clear();
  block_of_.clear();
  slots_.clear();
  bytes_ = 0;
}

}  // namespace lowtide::shard
