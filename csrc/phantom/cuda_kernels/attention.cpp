#include "phantom/cuda_kernels/attention.h"

#include <ATen/Context.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "phantom/cuda_kernels/cuda_call.h"

namespace lowtide::phantom {
namespace {

using at::ceil_div;
using at::round_up;
using at::Tensor;

constexpr std::int64_t kMaxFlashHeadDim = 256;

std::size_t fp32_bytes(std::int64_t numel) {
  return static_cast<std::size_t>(numel) * sizeof(float);
}

bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ||
         tensor.scalar_type() == at::kBFloat16;
}

bool dense_last_dim(const Tensor& tensor) { return tensor.stride(-1) == 1; }

// Columns of FlashAttention's fp32 accumulators.
std::int64_t flash_columns(const Tensor& query) {
  const std::int64_t head_dim = query.size(-1);
  return round_up<std::int64_t>(head_dim, head_dim <= 128 ? 32 : 64);
}

// Into how many parts FlashAttention splits the keys of every query block when
// there are too few of those for the device: as few as come within 15 % of the
// best use of its last wave.
std::int64_t flash_splits(const Tensor& query, const Tensor& key) {
  constexpr std::int64_t kQueryBlock = 64, kMostSplits = 128;
  constexpr std::int64_t kSlots = 2 * kMultiprocessors;
  const std::int64_t head_dim = query.size(-1);
  const std::int64_t key_block = head_dim <= 64    ? 256
                                 : head_dim <= 128 ? 128
                                                   : 64;
  const std::int64_t key_blocks = ceil_div(key.size(2), key_block);
  const std::int64_t blocks =
      query.size(0) * query.size(1) * ceil_div(query.size(2), kQueryBlock);
  if (static_cast<float>(blocks) >= 0.8F * kSlots) return 1;
  const std::int64_t most = std::min({kMostSplits, kSlots, key_blocks});
  const auto eligible = [&](std::int64_t splits) {
    return splits == 1 ||
           ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1);
  };
  const auto efficiency = [&](std::int64_t splits) {
    const float waves = static_cast<float>(blocks * splits) / kSlots;
    return waves / std::ceil(waves);
  };
  float best = 0;
  for (std::int64_t splits = 1; splits <= most; ++splits) {
    if (eligible(splits)) best = std::max(best, efficiency(splits));
  }
  for (std::int64_t splits = 1; splits <= most; ++splits) {
    if (eligible(splits) && efficiency(splits) >= 0.85F * best) return splits;
  }
  return 1;
}

// Beyond it the efficient kernel keeps no output in registers.
constexpr std::int64_t kWideHead = 128;

// Bytes of the efficient backward's workspace: fp32 accumulators of dq in tiles
// with a header; for wide heads in half precision also of dk and dv, one for
// each part into which the keys are split.
std::size_t efficient_workspace(const Tensor& query, const Tensor& key) {
  constexpr std::int64_t kHeader = 16, kKeys = 64, kMostParts = 200;
  const std::int64_t length = query.size(2), head_dim = query.size(3);
  const std::int64_t heads = query.size(0) * query.size(1);
  const bool half = is_half(query), wide = head_dim > kWideHead;
  const std::int64_t rows = head_dim <= 64 ? 64 : 128;
  const std::int64_t tile = half && head_dim > 64 && !wide ? 128 : 64;
  const std::int64_t tiles = ceil_div(head_dim, tile);
  std::int64_t bytes =
      ceil_div(length, rows) * tiles * (rows * tile * 4 + kHeader);
  if (half && wide) {
    const std::int64_t parts =
        std::min(ceil_div(key.size(2), kKeys),
                 std::max<std::int64_t>(1, kMostParts / heads));
    bytes += 2 * parts * kKeys * round_up<std::int64_t>(head_dim, 128) * 4;
  }
  return static_cast<std::size_t>(heads * bytes);
}

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
                                  const Tensor& key, const Tensor& value,
                                  double dropout, bool keep_logsumexp) {
  const std::int64_t batch = query.size(0), heads = query.size(1),
                     length = query.size(2);
  const auto longs = query.options().dtype(at::kLong);
  const auto floats = query.options().dtype(at::kFloat);
  AttentionOutputs made;
  if (kind == Attention::flash) {
    made.output = at::empty_like(query.transpose(1, 2)).transpose(1, 2);
    made.logsumexp = at::empty({batch, heads, length}, floats);
    const std::int64_t splits = dropout > 0 ? 1 : flash_splits(query, key);
    const std::int64_t rows = splits > 1 ? splits * batch * heads * length : 0;
    auto logsumexps = temporary(fp32_bytes(rows));
    const auto outputs = temporary(fp32_bytes(rows * flash_columns(query)));
    made.seed = at::empty({2}, longs);
    made.offset = at::empty({}, longs);
    const auto philox = temporary(dropout > 0 ? bytes_of(made.seed) : 0);
    logsumexps.clear();
    return made;
  }
  constexpr std::int64_t kAlignment = 32;
  made.output =
      at::empty({batch, length, heads, value.size(-1)}, query.options())
          .transpose(1, 2);
  made.logsumexp = at::empty(
      {batch, heads,
       keep_logsumexp ? round_up<std::int64_t>(length, kAlignment) : 0},
      floats);
  const bool accumulates = is_half(query) && value.size(-1) > kWideHead;
  const auto sums =
      temporary(accumulates ? fp32_bytes(made.output.numel()) : 0);
  return made;
}

Attention kind_of(const Tensor& offset) {
  return offset.defined() ? Attention::flash : Attention::efficient;
}

void copy_operands(Attention kind, const Tensor& gradient, const Tensor& output,
                   BackwardTemporaries& held) {
  if (kind != Attention::flash) return;
  for (const Tensor& tensor : {gradient, output}) {
    held.copies.push_back(
        temporary(bytes_to_be_contiguous(tensor.transpose(1, 2))));
  }
}

void accumulate(Attention kind, const Tensor& query, const Tensor& key,
                const Tensor& value, BackwardTemporaries& held) {
  const auto hold = [&](std::size_t bytes) {
    held.accumulators.push_back(temporary(bytes));
  };
  const std::int64_t batch = query.size(0), heads = query.size(1),
                     length = query.size(2), head_dim = query.size(3);
  if (kind != Attention::flash) {
    if (!is_half(query)) {
      const auto product = temporary(bytes_of(
          batch * heads * length * value.size(3), query.scalar_type()));
      const auto sums = temporary(fp32_bytes(batch * heads * length));
      hold(fp32_bytes(batch * heads * length));  // delta, transposed
    } else {
      hold(fp32_bytes(batch * heads * length));  // delta
    }
    hold(efficient_workspace(query, key));
    return;
  }
  const std::int64_t rows = round_up<std::int64_t>(length, 128);
  hold(fp32_bytes(batch * heads * rows));                         // softmax_d
  hold(fp32_bytes(batch * rows * heads * flash_columns(query)));  // dq
  if (key.size(1) != heads) {  // grouped: dk and dv of every query head
    const std::int64_t numel = batch * key.size(2) * heads * head_dim;
    hold(bytes_of(numel, key.scalar_type()));
    hold(bytes_of(numel, value.scalar_type()));
  }
  // The last one is given back first.
  std::reverse(held.accumulators.begin(), held.accumulators.end());
}

}  // namespace lowtide::phantom
