// The operators whose memory on CUDA was reviewed, and what was found.
//
// Meta mode runs no other operator: a wrong figure would look like a right one.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string_view>

#include "phantom/cuda_kernels/cuda_call.h"

namespace lowtide::phantom {

enum class Memory : std::uint8_t {
  view,     // none: the result shows the argument's bytes
  outputs,  // what it returns, besides temporaries listed with it
  parts,    // made of other operators, on CUDA as here
  kernel,   // this device has its own kernel, which allocates as CUDA's
  allowed,  // not reviewed; the user counts its outputs alone
};
std::string_view name_of(Memory memory);  // "view", ...

struct OperatorRule {
  Memory memory = Memory::outputs;
  AllocationRule allocations = nullptr;  // the outputs alone
};

// Nothing for an operator that is not on the list.  Overloads, in-place and
// out= forms share the entry of their operator; operators with the tag
// `pointwise` and views need none.  Thread-safe.
std::optional<OperatorRule> find_rule(const c10::OperatorHandle& op);

// Every entry: names in namespace aten, without overload and without the
// underscore of in-place forms.
std::map<std::string_view, Memory> listed_operators();

// Whether the shape of the result depends on values, which meta mode does not
// have.
bool depends_on_values(const c10::OperatorHandle& op);

}  // namespace lowtide::phantom
