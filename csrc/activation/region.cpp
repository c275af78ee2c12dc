#include "activation/region.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lowtide::activation {

bool Policy::lists(Treatment treatment) const {
  return std::any_of(names.begin(), names.end(), [&](const auto& entry) {
    return entry.second == treatment;
  });
}

Region::Region(std::string who, Policy policy, std::shared_ptr<NameBook> book,
               TransfersOf transfers_of)
    : who_(std::move(who)),
      policy_(std::move(policy)),
      book_(std::move(book)),
      transfers_of_(std::move(transfers_of)) {
  watches_interior = std::any_of(policy_.names.begin(), policy_.names.end(),
                                 [](const auto& entry) {
                                   return entry.first != kInputName &&
                                          entry.second != Treatment::recompute;
                                 });
}

Transfers& Region::transfers_on(const c10::Device& device) {
  if (!transfers_) transfers_ = transfers_of_(device);
  return *transfers_;
}

namespace {

bool is_parameter(const at::Tensor& tensor) {
  const at::Tensor origin =
      tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  return origin.requires_grad() && origin.is_leaf();
}

bool plain_and_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_inference() && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.is_meta() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         (tensor.storage().nbytes() == 0 ||
          tensor.storage()
                  .unsafeGetStorageImpl()
                  ->_mutable_data_ptr_no_checks() != nullptr);
}

}  // namespace

std::optional<std::string> Region::unfit(const at::Tensor& tensor,
                                         const std::string& name) const {
  if (!plain_and_dense(tensor)) return "not a plain dense tensor with bytes";
  if (is_parameter(tensor)) return "a parameter (a leaf), or a view of one";
  if (!tensor.requires_grad() && is_state && is_state(tensor)) {
    return "a parameter or buffer, or a view of one";
  }
  if (name == kInputName && !tensor.requires_grad()) {
    return "does not require grad: other regions share it";
  }
  if (transfers_ && transfers_->memories().device->runtime().device().type() !=
                        tensor.device().type()) {
    return "on another device than the region's other values";
  }
  return std::nullopt;
}

std::optional<std::string> Region::obstacle(const at::Tensor& tensor,
                                            const std::string& name) const {
  if (auto reason = unfit(tensor, name)) return reason;
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  if (bytes == 0) return kEmpty;
  if (bytes < policy_.min_bytes) {
    return base::concat("smaller than min_bytes=", policy_.min_bytes);
  }
  return std::nullopt;
}

}  // namespace lowtide::activation
