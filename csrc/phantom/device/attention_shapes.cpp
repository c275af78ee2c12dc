#include "phantom/device/attention_shapes.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cstddef>

namespace lowtide::phantom {
namespace {

using at::Tensor;

constexpr std::int64_t kMaxFlashHeadDim = 256;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::size_t fp32_bytes(std::int64_t numel) {
  return static_cast<std::size_t>(numel) * sizeof(float);
}

bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ||
         tensor.scalar_type() == at::kBFloat16;
}

bool dense_last_dim(const Tensor& tensor) { return tensor.stride(-1) == 1; }

bool flash_takes(const Tensor& query, const Tensor& key, const Tensor& value,
                 const std::optional<Tensor>& mask, bool is_causal) {
  const std::int64_t head_dim = query.size(-1);
  const bool square = query.size(-2) == key.size(-2);
  return at::globalContext().userEnabledFlashSDP() && !mask && is_half(query) &&
         head_dim == key.size(-1) && head_dim == value.size(-1) &&
         head_dim <= kMaxFlashHeadDim && (!is_causal || square);
}

bool efficient_takes(const Tensor& query, const Tensor& key,
                     const Tensor& value) {
  const std::int64_t alignment = is_half(query) ? 8 : 4;
  return at::globalContext().userEnabledMemEfficientSDP() &&
         (is_half(query) || query.scalar_type() == at::kFloat) &&
         query.size(1) == key.size(1) && query.size(1) == value.size(1) &&
         query.size(-1) % alignment == 0 && value.size(-1) % alignment == 0;
}

}  // namespace

Attention choose_attention(const Tensor& query, const Tensor& key,
                           const Tensor& value,
                           const std::optional<Tensor>& mask, bool is_causal) {
  const bool fusable = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
                       query.numel() > 0 && key.numel() > 0 &&
                       dense_last_dim(query) && dense_last_dim(key) &&
                       dense_last_dim(value);
  if (fusable && flash_takes(query, key, value, mask, is_causal)) {
    return Attention::flash;
  }
  if (fusable && efficient_takes(query, key, value)) {
    return Attention::efficient;
  }
  return Attention::math;
}

AttentionOutputs allocate_outputs(Attention kind, const Tensor& query,
                                  const Tensor& value, bool keep_logsumexp) {
  const std::int64_t batch = query.size(0), heads = query.size(1),
                     length = query.size(2);
  const auto longs = query.options().dtype(at::kLong);
  const auto floats = query.options().dtype(at::kFloat);
  AttentionOutputs made;
  if (kind == Attention::flash) {
    made.output = at::empty_like(query.transpose(1, 2)).transpose(1, 2);
    made.logsumexp = at::empty({batch, heads, length}, floats);
    made.seed = at::empty({2}, longs);
    made.offset = at::empty({}, longs);
    return made;
  }
  constexpr std::int64_t kAlignment = 32;
  made.output =
      at::empty({batch, length, heads, value.size(-1)}, query.options())
          .transpose(1, 2);
  made.logsumexp = at::empty(
      {batch, heads, keep_logsumexp ? round_up(length, kAlignment) : 0},
      floats);
  made.seed = at::empty({}, longs);
  made.offset = at::empty({1}, longs);
  return made;
}

Attention kind_of(const Tensor& offset) {
  return offset.dim() == 0 ? Attention::flash : Attention::efficient;
}

void backward_scratch(Attention kind, const Tensor& query, const Tensor& key,
                      const Tensor& value, Scratch& scratch) {
  const std::int64_t batch = query.size(0), heads = query.size(1),
                     length = query.size(2), head_dim = query.size(3);
  if (kind == Attention::flash) {
    const std::int64_t rows = round_up(length, 128);
    const std::int64_t columns =
        head_dim <= 128 ? round_up(head_dim, 32) : round_up(head_dim, 64);
    scratch.take(fp32_bytes(batch * heads * rows));            // softmax_d
    scratch.take(fp32_bytes(batch * rows * heads * columns));  // dq
    if (key.size(1) != heads) {  // grouped: dk and dv of every query head
      const auto expanded =
          static_cast<std::size_t>(batch * key.size(2) * heads * head_dim);
      scratch.take(expanded * key.itemsize());
      scratch.take(expanded * value.itemsize());
    }
    return;
  }
  scratch.take(fp32_bytes(batch * heads * length));  // delta
  if (is_half(query)) {
    scratch.take(fp32_bytes(batch * heads * round_up(length, 64) *
                            round_up(head_dim, 64)));  // dq
  }
}

}  // namespace lowtide::phantom
