// What is known of the contents of storages on devices, beside their bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>

#include "phantom/observer/driver.h"

namespace lowtide::dry {

// One fact a storage; it is true of every view.  Thread-safe.
template <typename Fact>
class StorageFacts {
 public:
  // Nothing is noted of a tensor that is only a part of its storage.
  void set(const at::Tensor& tensor, Fact fact) {
    const auto& storage = tensor.storage();
    const auto bytes = static_cast<std::int64_t>(storage.nbytes());
    if (static_cast<std::int64_t>(tensor.nbytes()) != bytes) return;
    const std::lock_guard lock(mutex_);
    facts_[address_of(first_byte(storage))] = {bytes, fact};
  }

  std::optional<Fact> of(const at::Tensor& tensor) const {
    const auto& storage = tensor.storage();
    return of(first_byte(storage), static_cast<std::int64_t>(storage.nbytes()));
  }
  // Of the storage that begins there and has as many bytes.
  std::optional<Fact> of(const void* first, std::int64_t bytes) const {
    const std::lock_guard lock(mutex_);
    const auto found = facts_.find(address_of(first));
    if (found == facts_.end() || found->second.bytes != bytes) {
      return std::nullopt;
    }
    return found->second.fact;
  }

  // Of every storage that reaches into the range.
  void forget(const void* first, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (facts_.empty()) return;
    const auto begin = address_of(first);
    const auto end = begin + static_cast<std::uintptr_t>(bytes);
    auto one = facts_.upper_bound(begin);
    if (one != facts_.begin()) --one;
    while (one != facts_.end() && one->first < end) {
      const auto stop =
          one->first + static_cast<std::uintptr_t>(one->second.bytes);
      one = stop > begin ? facts_.erase(one) : std::next(one);
    }
  }

 private:
  struct Known {
    std::int64_t bytes;
    Fact fact;
  };

  static std::uintptr_t address_of(const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
  }

  mutable std::mutex mutex_;
  std::map<std::uintptr_t, Known> facts_;
};

}  // namespace lowtide::dry
