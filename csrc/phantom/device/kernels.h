// The operators that this device implements itself, because the host's kernel
// allocates something else than CUDA's or does not exist.
#pragma once

#include <torch/library.h>

namespace lowtide::phantom {

// Each adds its operators to the PrivateUse1 kernels of namespace aten.
void register_storage_kernels(torch::Library& aten);    // empty, set_, ...
void register_copy_kernels(torch::Library& aten);       // copy_, item
void register_attention_kernels(torch::Library& aten);  // fused attention
void register_norm_kernels(torch::Library& aten);       // layer_norm, rms_norm
void register_dropout_kernels(torch::Library& aten);
void register_wide_gemm_kernels(torch::Library& aten);  // mm into fp32
void register_log_sigmoid(torch::Library& aten);

// Composites with a branch for CUDA, in meta mode: for both autograd's kernels
// and PrivateUse1's.
void register_attention_padding(torch::Library& aten);
void register_wide_softmax(torch::Library& aten);

// The host's kernel for operators that torch would otherwise compose here and
// does not compose on CUDA.
void register_pinned_kernels(torch::Library& aten);

// torch's casts under autocast, in the namespaces it reserves for them.
void register_autocast(torch::Library& fallback, torch::Library& aten);

}  // namespace lowtide::phantom
