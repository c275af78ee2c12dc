// What torch's fused attention kernels allocate on CUDA (sm80 and later).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "phantom/device/scratch.h"

namespace lowtide::phantom {

enum class Attention : std::uint8_t {
  flash,      // FlashAttention 2
  efficient,  // CUTLASS, "memory efficient"
  math,       // composed of matrix products and a softmax
};

// What torch chooses for these arguments, with the switches of
// torch.nn.attention.sdpa_kernel as they are.  cuDNN's kernels, which torch
// does not prefer, are never chosen.
Attention choose_attention(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value,
                           const std::optional<at::Tensor>& mask,
                           bool is_causal);

// What autograd keeps besides the inputs.  Tensors are [batch, heads, sequence,
// head dim].
struct AttentionOutputs {
  at::Tensor output;
  at::Tensor logsumexp;
  at::Tensor seed, offset;  // of the random numbers of dropout
};
AttentionOutputs allocate_outputs(Attention kind, const at::Tensor& query,
                                  const at::Tensor& value, bool keep_logsumexp);
// Which kernel these outputs are of.
Attention kind_of(const at::Tensor& offset);

// Accumulators of the backward, held while it runs.
void backward_scratch(Attention kind, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value,
                      Scratch& scratch);

}  // namespace lowtide::phantom
