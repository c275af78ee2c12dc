// Tensors over storages, without the dispatcher and below autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace lowtide::base {

// Normal (not inference), no autograd history.  `offset` in elements.
at::Tensor tensor_over(c10::Storage storage, at::ScalarType dtype,
                       at::IntArrayRef sizes, at::IntArrayRef strides,
                       std::int64_t offset);

// The bytes of a contiguous tensor, as collectives take them.
at::Tensor bytes_of(const at::Tensor& tensor);

// A storage of fixed size that owns `lease`.
c10::Storage owning_storage(c10::DataPtr lease, std::int64_t bytes);

}  // namespace lowtide::base
