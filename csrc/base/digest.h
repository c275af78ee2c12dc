// Whether tensors are the same, bit for bit, without keeping them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lowtide::base {

// Of sizes, dtype and bytes; copies the tensor to the host.
std::int64_t digest(const at::Tensor& tensor);

}  // namespace lowtide::base
