#include "activation/names.h"

#include <algorithm>

namespace lowtide::activation {

void NameBook::add(const at::Tensor& tensor, const std::string& name) {
  const std::lock_guard lock(mutex_);
  all_.insert(name);
  if (!tensor.has_storage() || tensor.is_inference()) return;
  auto* found = names_.find(tensor);
  if (found == nullptr || found->version != tensor._version()) {
    found = &names_.put(tensor, {tensor._version(), {}});
  }
  auto& names = found->names;
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    names.push_back(name);
  }
}

std::vector<std::string> NameBook::of(const at::Tensor& tensor) const {
  if (tensor.is_inference()) return {};
  const std::lock_guard lock(mutex_);
  const auto* const found = names_.find(tensor);
  if (found == nullptr || found->version != tensor._version()) return {};
  return found->names;
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
