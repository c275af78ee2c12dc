#include "shard/graph/weight_owners.h"

#include <mutex>
#include <utility>

#include "base/storage_map.h"

namespace lowtide::shard {
namespace {

struct Entry {
  std::weak_ptr<BackwardReceiver> receiver;
  std::int32_t index;
  WeakNodePtr node;
};

struct List {
  std::mutex mutex;
  base::StorageMap<Entry> entries;
};

// Outlives every unit, whatever order the process ends in.
List& list() {
  static auto* const instance = new List;
  return *instance;
}

}  // namespace

ListedWeight::ListedWeight(const at::Tensor& weight,
                           std::weak_ptr<BackwardReceiver> receiver,
                           std::int32_t index, WeakNodePtr node)
    : storage_(weight.storage().getWeakStorageImpl()) {
  const std::lock_guard lock(list().mutex);
  list().entries.put(weight, {std::move(receiver), index, std::move(node)});
}

ListedWeight::ListedWeight(ListedWeight&& other) noexcept
    : storage_(std::move(other.storage_)) {}

ListedWeight& ListedWeight::operator=(ListedWeight&& other) noexcept {
  if (this != &other) {
    unlist();
    storage_ = std::move(other.storage_);
  }
  return *this;
}

ListedWeight::~ListedWeight() { unlist(); }

void ListedWeight::unlist() {
  const auto* const storage = storage_._unsafe_get_target();
  if (storage != nullptr) {
    const std::lock_guard lock(list().mutex);
    list().entries.erase(storage);
  }
}

std::optional<WeightOwner> owner_of(const at::Tensor& weight) {
  const std::lock_guard lock(list().mutex);
  const auto* const entry = list().entries.find(weight);
  if (entry == nullptr) {
    return std::nullopt;
  }
  auto receiver = entry->receiver.lock();
  if (!receiver) {
    return std::nullopt;
  }
  return WeightOwner{std::move(receiver), entry->index, entry->node.lock()};
}

}  // namespace lowtide::shard
