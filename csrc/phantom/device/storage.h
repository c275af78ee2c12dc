// Storages and tensors of the simulated device, made without the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>

namespace lowtide::phantom {

// `bytes` from the current stream's pool, contents undefined.
c10::Storage make_storage(std::size_t bytes);

// A tensor over `storage` with the backend key `key` and the dtype, sizes,
// strides and flags of `like`.
at::Tensor tensor_like(c10::Storage storage, c10::DispatchKey key,
                       const at::Tensor& like);

// A view of `base` with the dtype, sizes, strides and flags of `like`.  As on
// other devices it is an inference tensor only if `base` is one.
at::Tensor view_like(const at::Tensor& base, const at::Tensor& like);

// In exact mode, a CPU tensor over the bytes of `tensor`, which it keeps alive.
// Tensors of other devices are returned as they are.
at::Tensor host_view(const at::Tensor& tensor);

// New bytes from the current stream's pool; keeps what fits of the old ones.
void resize_storage(c10::StorageImpl& storage, std::size_t bytes);

}  // namespace lowtide::phantom
