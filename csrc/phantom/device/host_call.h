// Phantom tensors as the tensors that a host kernel takes, for the length of
// one call: CPU tensors over the same bytes in exact mode, tensors of torch's
// meta device in meta mode.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace lowtide::phantom {

class HostCall {
 public:
  HostCall();

  // What a kernel gets for `tensor`; tensors of other devices and undefined
  // ones stay as they are.  Views of one storage stay views of one storage.
  at::Tensor host(const at::Tensor& tensor);

  // What the caller gets for a result: the argument it is, a view of an
  // argument, or a new tensor whose bytes come from the current stream's pool.
  at::Tensor phantom(const at::Tensor& tensor);

  // Resized and re-strided arguments (out=, in-place views) follow.
  void update_arguments();

 private:
  struct StoragePair {
    c10::Storage phantom, host;
  };
  struct TensorPair {
    at::Tensor phantom, host;
  };

  c10::Storage host_storage(const c10::Storage& phantom);

  bool exact_;
  c10::SmallVector<StoragePair, 8> storages_;
  c10::SmallVector<TensorPair, 8> tensors_;
};

}  // namespace lowtide::phantom
