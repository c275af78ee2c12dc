// torch.nn.functional.linear for a weight whose gradient is summed in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "shard/autograd_nodes.h"

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

}  // namespace lowtide::shard
