// The saved-tensor hooks of `lowtide.sequence_parallel.gather_policy`: what
// autograd saves of gathered values is their shard.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "gather/saved_values.h"

namespace lowtide::python {

// Which hooks autograd would call now, on this thread.
enum class ActiveHooks : std::uint8_t { none, ours, foreign };
ActiveHooks active_hooks();

// Of the innermost scope; null unless our hooks are the active ones.
std::shared_ptr<gather::SavedValues> active_saved_values();

void push_gather_hooks();
void pop_gather_hooks();

}  // namespace lowtide::python
