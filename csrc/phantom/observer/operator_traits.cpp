#include "phantom/observer/operator_traits.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace lowtide::dry {
namespace {

// What changes a tensor and not its bytes.
bool leaves_bytes(std::string_view name) {
  static const std::unordered_set<std::string_view> kNames = {
      "aten::as_strided_", "aten::detach_",    "aten::requires_grad_",
      "aten::resize_",     "aten::resize_as_", "aten::retain_grad",
      "aten::set_",        "aten::squeeze_",   "aten::swapaxes_",
      "aten::swapdims_",   "aten::t_",         "aten::transpose_",
      "aten::unsqueeze_",
  };
  return kNames.contains(name);
}

// Reads nothing of its first argument, which it writes.
bool overwrites(std::string_view name) {
  return name == "aten::fill_" || name == "aten::zero_" ||
         name == "aten::copy_";
}

// Whose results lowtide/phantom/dry/sizes.py knows.
bool is_answered(std::string_view name) {
  static const std::unordered_set<std::string_view> kNames = {
      "aten::_unique2", "aten::bincount",           "aten::histc",
      "aten::nonzero",  "aten::unique_consecutive", "aten::unique_dim",
  };
  return kNames.contains(name);
}

bool is_foreign(std::string_view name) {
  static const std::unordered_set<std::string_view> kTorchs = {
      "aten", "prim",     "prims",   "lowtide", "c10d", "_c10d_functional",
      "fsdp", "symm_mem", "dtensor",
  };
  return !kTorchs.contains(name.substr(0, name.find("::")));
}

// Without a handle for what did not come through the dispatcher.
OperatorTraits traits(const at::RecordFunction& function) {
  OperatorTraits found;
  const std::string_view name = function.name();
  const auto called = function.operator_name();
  if (called) found.handle = c10::Dispatcher::singleton().findSchema(*called);
  if (!found.handle) return found;
  const auto& schema = found.handle->schema();
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const auto* alias = argument.alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    if (writes && !leaves_bytes(name)) found.written.push_back(i);
    found.overwritten.push_back(writes &&
                                (argument.is_out() || overwrites(name)));
  }
  // Those of others may be arguments that their schema does not tell of.
  const bool tells = name.starts_with("aten::");
  for (std::size_t i = 0; tells && i < schema.returns().size(); ++i) {
    if (schema.returns()[i].alias_info() == nullptr) found.made.push_back(i);
  }
  found.has_kernel =
      found.handle->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  found.is_answered = is_answered(name);
  found.is_foreign = is_foreign(name);
  const auto tags = found.handle->getTags();
  found.is_random = std::find(tags.begin(), tags.end(),
                              at::Tag::nondeterministic_seeded) != tags.end();
  return found;
}

}  // namespace

const OperatorTraits& traits_of(const at::RecordFunction& function) {
  struct Known {
    std::string name;
    OperatorTraits traits;
  };
  // By where the operator's name stands, which tells overloads apart.  Other
  // names, such as those of collectives, come and go with what they name.
  static std::mutex mutex;
  static std::unordered_map<const void*, const Known*> known;
  static std::deque<Known> all;
  const std::string_view name = function.name();
  const std::lock_guard lock(mutex);
  const auto found = known.find(name.data());
  if (found != known.end() && found->second->name == name) {
    return found->second->traits;
  }
  auto its = traits(function);
  if (!its.handle) {
    static const OperatorTraits none;
    static const OperatorTraits writes_first = [] {
      OperatorTraits traits;
      traits.written = {0};
      return traits;
    }();
    // One of lowtide's that came without the dispatcher.
    return name.starts_with("lowtide::") ? writes_first : none;
  }
  const auto& kept = all.emplace_back(std::string(name), std::move(its));
  known[name.data()] = &kept;
  return kept.traits;
}

}  // namespace lowtide::dry
