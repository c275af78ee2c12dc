#include "phantom/device/operator_list.h"

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "phantom/cuda_kernels/rules.h"
#include "phantom/device/operator_names.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using Table = std::unordered_map<std::string_view, OperatorRule>;

constexpr std::pair<std::string_view, AllocationRule> kWithTemporaries[] = {
    {"_addmm_activation", &addmm},
    {"_chunk_cat", &chunk_cat},
    {"_foreach_max", &foreach_max},
    {"_foreach_norm", &foreach_norm},
    {"_fused_rms_norm", &contiguous_input},
    {"_index_put_impl", &index_put},
    {"_int_mm", &gemm},
    {"_scaled_mm", &gemm},
    {"_softmax_backward_data", &softmax_backward},
    {"addbmm", &gemm_add},
    {"addmm", &addmm},
    {"addmv", &gemm_add},
    {"all", &truth},
    {"amax", &extremum},
    {"amin", &extremum},
    {"any", &truth},
    {"argmax", &arg_extremum},
    {"argmin", &arg_extremum},
    {"baddbmm", &gemm_add},
    {"bernoulli", &bernoulli},
    {"bmm", &gemm},
    {"count_nonzero", &count_nonzero},
    {"cumsum", &cumulative_sum},
    {"dot", &gemm},
    {"embedding_dense_backward", &embedding_backward},
    {"huber_loss", &huber_loss},
    {"index_put", &index_put},
    {"linalg__powsum", &sum_like},
    {"linalg_vector_norm", &sum_like},
    {"max", &extremum},
    {"mean", &sum_like},
    {"min", &extremum},
    {"mm", &gemm},
    {"mse_loss", &reduced_loss},
    {"mv", &gemm},
    {"nansum", &sum_like},
    {"native_group_norm_backward", &group_norm_backward},
    {"nll_loss_backward", &contiguous_gradient},
    {"norm", &sum_like},
    {"prod", &sum_like},
    {"smooth_l1_loss", &reduced_loss},
    {"split_with_sizes_copy", &split_with_sizes_copy},
    {"std", &variance},
    {"sum", &sum_like},
    {"var", &variance},
    {"vdot", &gemm},
};

std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> found;
  while (!text.empty()) {
    const std::size_t end = text.find(' ');
    found.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);  // every word has a blank behind it
  }
  return found;
}

const Table& table() {
  static const Table table = [] {
    Table entries;
    for (const auto name : words(kOutputs)) entries[name] = {Memory::outputs};
    for (const auto name : words(kParts)) entries[name] = {Memory::parts};
    for (const auto name : words(kKernels)) entries[name] = {Memory::kernel};
    for (const auto& [name, allocations] : kWithTemporaries) {
      entries[name] = {Memory::outputs, allocations};
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

std::map<std::string_view, Memory> listed_operators() {
  std::map<std::string_view, Memory> listed;
  for (const auto& [name, rule] : table()) listed[name] = rule.memory;
  return listed;
}

bool depends_on_values(const c10::OperatorHandle& op) {
  static const auto all = words(kValueDependent);
  static const std::unordered_set<std::string_view> names(all.begin(),
                                                          all.end());
  return names.count(aten_name(op.schema())) > 0;
}

}  // namespace lowtide::phantom
