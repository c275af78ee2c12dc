// The names of reviewed operators, in namespace aten, without overload and
// without the underscore of in-place forms; separated by blanks.
#pragma once

#include <string_view>

namespace lowtide::phantom {

// CUDA's kernels allocate what they return and, at most, buffers of a few
// hundred KiB (reductions), which are not counted.
inline constexpr std::string_view kOutputs =
    // reductions and scans
    "_aminmax _cummax_helper _cummin_helper _logcumsumexp "
    "aminmax cumprod "
    "std_mean trace "
    "var_mean "
    // softmax and losses
    "_log_softmax _log_softmax_backward_data _masked_softmax "
    "_masked_softmax_backward _softmax "
    "binary_cross_entropy binary_cross_entropy_backward "
    "huber_loss_backward mse_loss_backward nll_loss2d_backward "
    "nll_loss2d_forward nll_loss_forward "
    "smooth_l1_loss_backward "
    // choosing and placing elements
    "bucketize cat flip gather index index_add index_copy index_fill "
    "index_select masked_fill masked_scatter roll scatter scatter_add "
    "scatter_reduce searchsorted take tril triu unfold_backward where "
    // filling
    "arange cauchy exponential eye fill geometric linspace "
    "log_normal logspace normal random range tril_indices triu_indices "
    "uniform zero "
    // elementwise, without the tag or with it on some overloads only
    "_masked_scale _prelu_kernel _prelu_kernel_backward complex copysign elu "
    "elu_backward eq floor_divide gcd ge gelu gelu_backward glu glu_backward "
    "gt hardshrink hardshrink_backward hardsigmoid hardsigmoid_backward "
    "hardswish hardswish_backward hardtanh hardtanh_backward heaviside lcm le "
    "leaky_relu leaky_relu_backward "
    "lt mish mish_backward ne polar rrelu_with_noise rsub silu_backward "
    "softplus softplus_backward softshrink softshrink_backward threshold "
    "threshold_backward "
    // normalisation, pooling, padding and resampling
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d "
    "_adaptive_avg_pool3d_backward adaptive_avg_pool2d adaptive_avg_pool3d "
    "avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward "
    "grid_sampler_2d grid_sampler_2d_backward max_pool2d_with_indices "
    "max_pool2d_with_indices_backward max_pool3d_with_indices "
    "max_pool3d_with_indices_backward "
    "native_group_norm "
    "reflection_pad1d reflection_pad1d_backward reflection_pad2d "
    "reflection_pad2d_backward replication_pad1d replication_pad1d_backward "
    "replication_pad2d replication_pad2d_backward upsample_bicubic2d "
    "upsample_bicubic2d_backward upsample_bilinear2d "
    "upsample_bilinear2d_backward upsample_linear1d "
    "upsample_linear1d_backward upsample_nearest1d "
    "upsample_nearest1d_backward upsample_nearest2d "
    "upsample_nearest2d_backward upsample_nearest3d "
    "upsample_nearest3d_backward "
    // optimizers and checks: in place or nothing
    "_amp_foreach_non_finite_check_and_unscale _amp_update_scale "
    "_assert_async _fused_adagrad _fused_adam _fused_adamw _fused_sgd "
    // one kernel that writes its outputs
    "addr ";

// Torch builds them from other operators on CUDA too, or its CUDA kernel
// allocates what those allocate.  With the _foreach_ operators.
inline constexpr std::string_view kParts =
    "_safe_softmax _to_copy _unsafe_view clone constant_pad_nd "
    "diagonal_backward embedding "
    "empty_like full full_like lift_fresh logsumexp new_empty "
    "new_empty_strided new_full new_ones new_zeros ones ones_like rand "
    "rand_like randint randn randn_like repeat scalar_tensor select_backward "
    "slice_backward squeeze stack t transpose unsqueeze "
    "zeros zeros_like ";

// Have a kernel of this device's own.
inline constexpr std::string_view kKernels =
    "_fused_rms_norm_backward _local_scalar_dense "
    "_scaled_dot_product_fused_attention_overrideable "
    "_scaled_dot_product_fused_attention_overrideable_backward copy empty "
    "empty_strided log_sigmoid_backward log_sigmoid_forward native_dropout "
    "native_dropout_backward native_layer_norm "
    "native_layer_norm_backward record_stream resize set ";

// The shape of the result depends on values.
inline constexpr std::string_view kValueDependent =
    "_unique _unique2 equal masked_select nonzero repeat_interleave "
    "unique_consecutive unique_dim ";

}  // namespace lowtide::phantom
