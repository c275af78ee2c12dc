// Which unit a full parameter's gradient goes to, asked by the tensor alone:
// compiled code knows nothing else.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "shard/graph/autograd_nodes.h"

namespace lowtide::shard {

struct WeightOwner {
  std::shared_ptr<BackwardReceiver> receiver;
  std::int32_t index;
  NodePtr node;  // that replaces AccumulateGrad
};

// Lists a parameter for as long as it lives.  Move-only.
class ListedWeight {
 public:
  ListedWeight() = default;
  ListedWeight(const at::Tensor& weight,
               std::weak_ptr<BackwardReceiver> receiver, std::int32_t index,
               WeakNodePtr node);
  ListedWeight(ListedWeight&& other) noexcept;
  ListedWeight& operator=(ListedWeight&& other) noexcept;
  ~ListedWeight();

 private:
  void unlist();

  // Keeps the address from being used again.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{
      c10::intrusive_ptr<c10::StorageImpl>()};
};

// The owner of the listed parameter whose storage `weight` has; none if there
// is none any more.  Thread-safe.
std::optional<WeightOwner> owner_of(const at::Tensor& weight);

}  // namespace lowtide::shard
