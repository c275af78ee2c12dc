#include "gather/saved_values.h"

#include <utility>

#include "base/check.h"
#include "base/tensor_over.h"

namespace lowtide::gather {

SavedValue::SavedValue(const at::Tensor& tensor)
    : kept_(base::without_history(tensor)),
      version_(tensor),
      dtype_(tensor.scalar_type()) {}

SavedValue::SavedValue(std::shared_ptr<Site> site, const at::Tensor& tensor)
    : version_(tensor),
      site_(std::move(site)),
      consumer_(site_->add_consumer()),
      dtype_(tensor.scalar_type()),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      offset_(tensor.storage_offset()) {}

SavedValue::~SavedValue() {
  if (site_) site_->drop_consumer(consumer_);
}

at::Tensor SavedValue::unpack() const {
  if (site_) {
    const at::Tensor gathered = site_->take(consumer_);
    return base::tensor_over(gathered.storage(), dtype_, sizes_, strides_,
                             offset_);
  }
  if (version_.changed()) {
    version_.throw_modified("gather_policy", "a tensor that backward needs",
                            ", as it was saved", "Write out of place.");
  }
  return kept_;
}

void SavedValues::add(const at::Tensor& gathered, std::shared_ptr<Site> site) {
  const std::lock_guard lock(mutex_);
  sites_.put(gathered, std::move(site));
}

std::shared_ptr<Site> SavedValues::site_of(const at::Tensor& tensor) const {
  if (tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg()) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  const auto* const site = sites_.find(tensor);
  return site == nullptr ? nullptr : *site;
}

std::unique_ptr<SavedValue> SavedValues::pack(const at::Tensor& tensor) {
  auto site = site_of(tensor);
  if (!site) return std::make_unique<SavedValue>(tensor);
  site->require_unmodified();
  return std::make_unique<SavedValue>(std::move(site), tensor);
}

}  // namespace lowtide::gather
