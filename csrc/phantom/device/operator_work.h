// What an operator's kernel computes and moves, from the shapes of its
// arguments and results.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>

#include "phantom/time/costs.h"

namespace lowtide::phantom {

// Of the elements that a tensor shows, each once however often it is repeated
// (expanded dimensions).
double bytes_touched(const at::Tensor& tensor);
Rate rate_of(at::ScalarType dtype);

// One kernel: every argument read once, every result written once, what is
// changed in place both; products, convolutions and their backward have FLOPs.
// Operators that choose elements read no more than they return.  Nothing for
// views and for operators without elements.
std::optional<Work> operator_work(const c10::OperatorHandle& op,
                                  at::ArrayRef<c10::IValue> arguments,
                                  at::ArrayRef<c10::IValue> results);

// Of scaled_dot_product_attention: two products forward, five backward, half of
// them where each query sees only the keys before it.
double attention_flops(const at::Tensor& query, const at::Tensor& key,
                       const at::Tensor& value, bool is_causal,
                       bool is_backward);

}  // namespace lowtide::phantom
