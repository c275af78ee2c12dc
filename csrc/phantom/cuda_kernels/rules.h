// One rule for each family of operators whose CUDA kernels allocate more than
// their outputs; operator_list.cpp says which operator follows which.
#pragma once

#include "phantom/cuda_kernels/cuda_call.h"

namespace lowtide::phantom {

// gemm_rules.cpp
void gemm(const CudaCall& call);      // mm, bmm, dot, ...
void gemm_add(const CudaCall& call);  // addmv, baddbmm, ...
void addmm(const CudaCall& call);

// reduction_rules.cpp
void sum_like(const CudaCall& call);      // sum, mean, prod, norms
void extremum(const CudaCall& call);      // amax, amin, max, min
void arg_extremum(const CudaCall& call);  // argmax, max and min of a dim
void truth(const CudaCall& call);         // all, any
void variance(const CudaCall& call);      // std, var
void count_nonzero(const CudaCall& call);

// indexing_rules.cpp
void embedding_backward(const CudaCall& call);
void index_put(const CudaCall& call);
void cumulative_sum(const CudaCall& call);

// sharded_copy_rules.cpp
void chunk_cat(const CudaCall& call);
void split_with_sizes_copy(const CudaCall& call);

// elementwise_rules.cpp
void softmax_backward(const CudaCall& call);
void contiguous_input(const CudaCall& call);     // rms_norm
void contiguous_gradient(const CudaCall& call);  // nll_loss_backward
void reduced_loss(const CudaCall& call);         // mse_loss, ...
void huber_loss(const CudaCall& call);
void bernoulli(const CudaCall& call);
void group_norm_backward(const CudaCall& call);

// foreach_rules.cpp
void foreach_norm(const CudaCall& call);
void foreach_max(const CudaCall& call);

}  // namespace lowtide::phantom
