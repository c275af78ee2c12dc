#include "phantom/device/operator_list.h"

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using Table = std::unordered_map<std::string_view, OperatorRule>;

// CUDA's kernels allocate what they return and, at most, buffers of a few
// hundred KiB (reductions), which are not counted.
constexpr std::string_view kOutputs[] = {
    // reductions
    "all",
    "amax",
    "amin",
    "aminmax",
    "any",
    "argmax",
    "argmin",
    "cumsum",
    "linalg_vector_norm",
    "linalg__powsum",
    "max",
    "mean",
    "min",
    "nansum",
    "norm",
    "prod",
    "std",
    "std_mean",
    "sum",
    "var",
    "var_mean",
    // softmax and losses
    "_log_softmax",
    "_log_softmax_backward_data",
    "_softmax",
    "_softmax_backward_data",
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "huber_loss_backward",
    "mse_loss",
    "mse_loss_backward",
    "nll_loss_backward",
    "nll_loss_forward",
    "nll_loss2d_backward",
    "nll_loss2d_forward",
    "smooth_l1_loss",
    "smooth_l1_loss_backward",
    // choosing and placing elements
    "bucketize",
    "cat",
    "flip",
    "gather",
    "index",
    "index_add",
    "index_copy",
    "index_fill",
    "index_select",
    "masked_fill",
    "masked_scatter",
    "roll",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "searchsorted",
    "take",
    "tril",
    "triu",
    "where",
    // filling
    "arange",
    "bernoulli",
    "exponential",
    "eye",
    "fill",
    "geometric",
    "linspace",
    "log_normal",
    "normal",
    "random",
    "tril_indices",
    "triu_indices",
    "uniform",
    "zero",
    // activations and normalisation
    "gelu",
    "gelu_backward",
    "glu",
    "glu_backward",
    "mish_backward",
    "native_batch_norm",
    "native_batch_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "silu_backward",
    // optimizers: in place
    "_amp_foreach_non_finite_check_and_unscale",
    "_amp_update_scale",
    "_fused_adagrad",
    "_fused_adam",
    "_fused_adamw",
    "_fused_sgd",
    // one kernel that writes its outputs or out= tensors
    "_chunk_cat",
    "_fused_rms_norm",
    "addr",
};

// Torch builds them from other operators on CUDA too, or its CUDA kernel
// allocates what those allocate (foreach).
constexpr std::string_view kParts[] = {
    "_to_copy",
    "_unsafe_view",
    "clone",
    "constant_pad_nd",
    "diagonal_backward",
    "embedding",
    "empty_like",
    "full",
    "full_like",
    "lift_fresh",
    "logsumexp",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "repeat",
    "scalar_tensor",
    "select_backward",
    "slice_backward",
    "split_with_sizes_copy",
    "squeeze",
    "stack",
    "t",
    "transpose",
    "unsqueeze",
    "zeros",
    "zeros_like",
};

// Registered in kernels.cpp.
constexpr std::string_view kKernels[] = {
    "native_dropout",
    "native_dropout_backward",
    "_fused_rms_norm_backward",
    "_local_scalar_dense",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "copy",
    "empty",
    "empty_strided",
    "native_layer_norm",
    "native_layer_norm_backward",
    "record_stream",
    "resize",
    "set",
};

constexpr std::pair<std::string_view, ScratchRule> kWithScratch[] = {
    {"_addmm_activation", &gemm_add_scratch},
    {"_foreach_norm", &foreach_norm_scratch},
    {"_index_put_impl", &index_put_scratch},
    {"addbmm", &gemm_add_scratch},
    {"addmm", &gemm_add_scratch},
    {"addmv", &gemm_add_scratch},
    {"baddbmm", &gemm_add_scratch},
    {"bmm", &gemm_scratch},
    {"dot", &gemm_scratch},
    {"embedding_dense_backward", &embedding_backward_scratch},
    {"index_put", &index_put_scratch},
    {"mm", &gemm_scratch},
    {"mv", &gemm_scratch},
    {"vdot", &gemm_scratch},
};

constexpr std::string_view kValueDependent[] = {
    "_unique",
    "_unique2",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
};

const Table& table() {
  static const Table table = [] {
    Table entries;
    for (const auto name : kOutputs) entries[name] = {Memory::outputs};
    for (const auto name : kParts) entries[name] = {Memory::parts};
    for (const auto name : kKernels) entries[name] = {Memory::kernel};
    for (const auto& [name, scratch] : kWithScratch) {
      entries[name] = {Memory::outputs, scratch};
    }
    return entries;
  }();
  return table;
}

// "aten::add_" -> "add_"; operators of other libraries are not on the list.
std::string_view aten_name(const c10::FunctionSchema& schema) {
  constexpr std::string_view kAten = "aten::";
  const std::string_view name = schema.name();
  if (name.substr(0, kAten.size()) != kAten) return {};
  return name.substr(kAten.size());
}

std::string_view without_in_place(std::string_view name) {
  const bool in_place =
      name.size() > 1 && name.back() == '_' && name[name.size() - 2] != '_';
  return in_place ? name.substr(0, name.size() - 1) : name;
}

bool is_view(const c10::FunctionSchema& schema) {
  const auto shows_argument = [](const c10::Argument& value) {
    return value.alias_info() != nullptr && !value.alias_info()->isWrite();
  };
  const auto writes = [](const c10::Argument& value) {
    return value.alias_info() != nullptr && value.alias_info()->isWrite();
  };
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  return !returns.empty() &&
         std::all_of(returns.begin(), returns.end(), shows_argument) &&
         std::none_of(arguments.begin(), arguments.end(), writes);
}

bool is_allowed(const c10::FunctionSchema& schema) {
  const auto& allowed = phantom_device().options().allowed_operators;
  return std::find(allowed.begin(), allowed.end(), schema.name()) !=
         allowed.end();
}

std::optional<OperatorRule> look_up(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string_view name = aten_name(schema);
  for (const auto key : {name, without_in_place(name)}) {
    const auto entry = table().find(key);
    if (entry != table().end()) return entry->second;
  }
  if (is_view(schema)) return OperatorRule{Memory::view};
  if (op.hasTag(at::Tag::pointwise)) return OperatorRule{Memory::outputs};
  if (name.substr(0, 9) == "_foreach_") return OperatorRule{Memory::parts};
  if (is_allowed(schema)) return OperatorRule{Memory::allowed};
  return std::nullopt;
}

}  // namespace

std::string_view name_of(Memory memory) {
  switch (memory) {
    case Memory::view:
      return "view";
    case Memory::outputs:
      return "outputs";
    case Memory::parts:
      return "parts";
    case Memory::kernel:
      return "kernel";
    case Memory::allowed:
      return "allowed";
  }
  LOWTIDE_INVARIANT(false, "a kind of operator memory");
}

std::optional<OperatorRule> find_rule(const c10::OperatorHandle& op) {
  // By schema, which lives as long as the operator.
  thread_local std::unordered_map<const c10::FunctionSchema*,
                                  std::optional<OperatorRule>>
      known;
  const auto [entry, is_new] = known.try_emplace(&op.schema());
  if (is_new) entry->second = look_up(op);
  return entry->second;
}

bool depends_on_values(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string_view> names(
      std::begin(kValueDependent), std::end(kValueDependent));
  return names.count(aten_name(op.schema())) > 0;
}

}  // namespace lowtide::phantom
