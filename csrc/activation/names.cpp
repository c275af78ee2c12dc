#include "activation/names.h"

#include <algorithm>

namespace lowtide::activation {

void NameBook::add(const at::Tensor& tensor, const std::string& name) {
  const std::lock_guard lock(mutex_);
  all_.insert(name);
  if (!tensor.has_storage() || tensor.is_inference()) return;
  const auto* const key = tensor.storage().unsafeGetStorageImpl();
  const auto found = entries_.find(key);
  if (found == entries_.end() || stale(found->second, tensor)) {
    entries_.insert_or_assign(
        key, Entry{tensor.storage().getWeakStorageImpl(),
                   static_cast<std::uint32_t>(tensor._version()),
                   {name}});
  } else {
    auto& names = found->second.names;
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      names.push_back(name);
    }
  }
  if (entries_.size() > sweep_at_) {
    std::erase_if(entries_, [](const auto& entry) {
      return entry.second.identity.expired();
    });
    sweep_at_ = std::max<std::size_t>(64, 2 * entries_.size());
  }
}

bool NameBook::stale(const Entry& entry, const at::Tensor& tensor) const {
  // An expired identity: the address was used again.
  return entry.identity.expired() ||
         entry.version != static_cast<std::uint32_t>(tensor._version());
}

std::vector<std::string> NameBook::of(const at::Tensor& tensor) const {
  if (!tensor.has_storage() || tensor.is_inference()) return {};
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == entries_.end() || stale(found->second, tensor)) return {};
  return found->second.names;
}

std::set<std::string> NameBook::all() const {
  const std::lock_guard lock(mutex_);
  return all_;
}

std::map<std::string, NameFigures> RegionFigures::names() const {
  const std::lock_guard lock(mutex_);
  return names_;
}

void RegionFigures::reset() {
  const std::lock_guard lock(mutex_);
  names_.clear();
}

}  // namespace lowtide::activation
