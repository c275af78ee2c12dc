// What torch's fused attention kernels allocate on CUDA (sm80 and later).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace lowtide::phantom {

enum class Attention : std::uint8_t {
  flash,      // FlashAttention 2
  efficient,  // CUTLASS, "memory efficient"
  math,       // composed of matrix products and a softmax
};

// What torch chooses for these arguments, with the switches of
// torch.nn.attention.sdpa_kernel as they are and TORCH_CUDNN_SDPA_DEPRIORITIZED
// set: cuDNN, which torch may prefer on an H100, is never chosen, because only
// cuDNN knows its workspace.
Attention choose_attention(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value,
                           const std::optional<at::Tensor>& mask,
                           bool is_causal);

// Tensors are [batch, heads, sequence, head dim].

// What autograd keeps besides the inputs, allocated with what the forward
// holds while it runs.
struct AttentionOutputs {
  at::Tensor output;
  at::Tensor logsumexp;
  at::Tensor seed, offset;  // of the random numbers; flash only
};
AttentionOutputs allocate_outputs(Attention kind, const at::Tensor& query,
                                  const at::Tensor& key,
                                  const at::Tensor& value, double dropout,
                                  bool keep_logsumexp);
// Which kernel these outputs are of.
Attention kind_of(const at::Tensor& offset);

// What the backward holds while it runs.  `copies` come before the gradients,
// `accumulators` after them.
struct BackwardTemporaries {
  std::vector<c10::DataPtr> copies, accumulators;
};
void copy_operands(Attention kind, const at::Tensor& gradient,
                   const at::Tensor& output, BackwardTemporaries& held);
void accumulate(Attention kind, const at::Tensor& query, const at::Tensor& key,
                const at::Tensor& value, BackwardTemporaries& held);

}  // namespace lowtide::phantom
