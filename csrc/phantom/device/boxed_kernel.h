// The kernel of every operator without one of its own: the host's, on the same
// bytes or on none, with its outputs and CUDA's temporaries in the books.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace lowtide::phantom {

// Meta mode: throws lowtide::Error, naming the operator and what to do, for an
// operator that is not on the list or whose result depends on values.
// Both modes: for tensors with dimensions on another device.
void boxed_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace lowtide::phantom
