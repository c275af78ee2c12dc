// Fused weight gradients under torch.compile, as operators (torch.ops.lowtide):
//
// fused_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor
//   What torch.nn.functional.linear computes, traced as its matrix product.
// add_weight_gradient(Tensor weight, Tensor grad_output, Tensor activation)
//   -> ()
//   Adds grad_output^T activation to the gradient of the full parameter
//   `weight`, where it is reduced from.  It stands in the compiled backward,
//   and what it does is declared to the compiler as an ordered effect
//   (python/lowtide/_sharding/fused.py): such calls are neither removed nor
//   merged nor reordered.
//
// [Note: Who owns a weight]
// Equal layers share one graph, so nothing of a layer may be in it.  The
// operator knows the unit by the weight's storage (weight_owners.h), which
// compiled code is given and saves as it is.
#pragma once

#include <ATen/core/Tensor.h>

namespace lowtide::shard {

// weight: [out, in]; grad_output: [tokens, out]; activation: [tokens, in].
// Calls the operator, so that a trace has it.  It throws lowtide::Error when
// `weight` is no full parameter of a fused unit, or when hooks or
// torch.autograd.grad wait for the gradient: compiled code has none for them.
void add_weight_gradient(const at::Tensor& weight,
                         const at::Tensor& grad_output,
                         const at::Tensor& activation);

}  // namespace lowtide::shard
