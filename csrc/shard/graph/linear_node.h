// torch.nn.functional.linear for a weight whose gradient is summed in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "shard/graph/autograd_nodes.h"

namespace lowtide::shard {

// input W^T + bias, recorded so that backward offers the weight's gradient to
// `receiver` as the product it is (BackwardReceiver::on_product) and gives
// autograd none if it was taken.  The gradients of `input` and `bias` are
// autograd's own.
//
// input: [..., in], two dimensions or more; weight: [out, in], the receiver's
// parameter `index`, a leaf; bias: [out] or undefined.  One dtype.  Saves what
// autograd saves, through saved-tensor hooks.  Outside of autocast: the caller
// has looked.
at::Tensor fused_linear(std::weak_ptr<BackwardReceiver> receiver,
                        std::int32_t index, const at::Tensor& input,
                        const at::Tensor& weight, const at::Tensor& bias);

// The same for code that is compiled: the receiver is asked for when backward
// runs, by an operator that the traced backward has in the product's place
// (linear_operators.h).  The weight's gradient is undefined in any case.
at::Tensor traced_linear(const at::Tensor& input, const at::Tensor& weight,
                         const at::Tensor& bias);

// What both compute, without a record.
at::Tensor linear_without_record(const at::Tensor& input,
                                 const at::Tensor& weight,
                                 const at::Tensor& bias);

// Why autograd has to see the gradient of the parameter that `node` stands for,
// in the backward that runs on this thread.
Obstacle obstacle_of(const NodePtr& node);

}  // namespace lowtide::shard
