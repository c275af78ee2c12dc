// What is known of a tensor's bytes, for as long as its storage lives: views
// and aliases find the same.  Holds no tensor.  Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

namespace lowtide::base {

template <typename Value>
class StorageMap {
 public:
  // Null for bytes that nothing was put in for, and for tensors without any.
  Value* find(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return nullptr;
    const auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
    return found == entries_.end() ? nullptr : &found->second.value;
  }
  const Value* find(const at::Tensor& tensor) const {
    return const_cast<StorageMap*>(this)->find(tensor);
  }

  // In the place of what was put in before; `tensor` must have a storage.
  Value& put(const at::Tensor& tensor, Value value) {
    sweep();
    const auto& storage = tensor.storage();
    const auto [place, made] = entries_.insert_or_assign(
        storage.unsafeGetStorageImpl(),
        Entry{storage.getWeakStorageImpl(), std::move(value)});
    return place->second.value;
  }

  // By the address of a storage, which may be gone.
  void erase(const c10::StorageImpl* storage) { entries_.erase(storage); }

  // Entries of storages that are gone may be among them.
  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    // Keeps the address from being used by another storage.
    c10::weak_intrusive_ptr<c10::StorageImpl> identity;
    Value value;
  };

  // Constant time for each `put`, on average.
  void sweep() {
    if (entries_.size() < sweep_at_) return;
    std::erase_if(entries_, [](const auto& entry) {
      return entry.second.identity.expired();
    });
    sweep_at_ = std::max(kSmall, 2 * entries_.size());
  }

  static constexpr std::size_t kSmall = 64;
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  std::size_t sweep_at_ = kSmall;
};

}  // namespace lowtide::base
