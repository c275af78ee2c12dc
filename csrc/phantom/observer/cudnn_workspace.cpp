#include "phantom/observer/cudnn_workspace.h"

#include <ATen/core/Tensor.h>

#include <string_view>

namespace lowtide::dry {
namespace {

constexpr std::string_view kAttention =
    "aten::_scaled_dot_product_cudnn_attention";
constexpr std::int64_t kBytes = 256;

}  // namespace

std::optional<std::int64_t> cudnn_workspace(
    const at::RecordFunction& function) {
  const std::string_view name(function.name());
  if (!name.starts_with(kAttention)) return std::nullopt;
  const auto inputs = function.inputs();
  // (grad_out, query, key, value, ...), all [batch, heads, tokens, width].
  const bool is_backward = name.size() > kAttention.size();
  if (!is_backward || inputs.size() < 4 || !inputs[3].isTensor()) {
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
