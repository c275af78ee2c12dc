#include "phantom/observer/cudnn_workspace.h"

#include <ATen/core/Tensor.h>

#include <string_view>

namespace lowtide::dry {
namespace {

constexpr std::string_view kAttention =
    "aten::_scaled_dot_product_cudnn_attention";
constexpr std::int64_t kBytes = 256;

// [batch, heads, tokens, width], in numbers: not nested, and not while a
// compiler traces with symbols for them.
bool has_sizes(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const auto& tensor = value.toTensor();
  return !tensor.is_nested() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         tensor.dim() == 4;
}

}  // namespace

std::optional<std::int64_t> cudnn_workspace(
    const at::RecordFunction& function) {
  const std::string_view name(function.name());
  if (!name.starts_with(kAttention)) return std::nullopt;
  const auto inputs = function.inputs();
  // (grad_out, query, key, value, ...)
  const bool is_backward = name.size() > kAttention.size();
  if (!is_backward || inputs.size() < 4 || !has_sizes(inputs[1]) ||
      !has_sizes(inputs[2]) || !has_sizes(inputs[3])) {
    return kBytes;
  }
  const auto& query = inputs[1].toTensor();
  const auto& key = inputs[2].toTensor();
  const auto& value = inputs[3].toTensor();
  if (query.size(1) == key.size(1)) return kBytes;
  const auto heads = query.size(0) * query.size(1) * key.size(2);
  return kBytes + heads * (key.size(3) + value.size(3)) * key.itemsize();
}

}  // namespace lowtide::dry
