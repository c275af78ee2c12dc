// What is the same of all calls of an operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace lowtide::dry {

struct OperatorTraits {
  // None for what does not come through the dispatcher.
  std::optional<c10::OperatorHandle> handle;
  std::vector<std::size_t> written;  // arguments whose bytes it changes
  std::vector<bool> overwritten;     // by argument: changes and never reads
  std::vector<std::size_t> made;     // results that are no views of arguments
  // A kernel for devices alone makes the results, not other operators.
  bool has_kernel = false;
  // lowtide/phantom/dry/sizes.py writes what it knows of the results.
  bool is_answered = false;
  bool is_random = false;
  // Of a library that is not torch's: it may write with kernels of its own.
  bool is_foreign = false;
};

// What a table by names of operators has.
template <typename Value>
std::optional<Value> found_in(
    const std::unordered_map<std::string_view, Value>& table,
    std::string_view name) {
  const auto found = table.find(name);
  if (found == table.end()) return std::nullopt;
  return found->second;
}

// Looked up once an operator; valid for ever.  Thread-safe.
const OperatorTraits& traits_of(const at::RecordFunction& function);

}  // namespace lowtide::dry
