// One tensor that a region holds for backward: kept as it is, packed by the
// saved-tensor hooks of an enclosing region, or in a stash.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "activation/stash.h"
#include "base/seen_version.h"

namespace lowtide::activation {

using base::SeenVersion;
using base::without_history;

class HeldValue {
 public:
  explicit HeldValue(const at::Tensor& tensor);

  // Exactly one of these, after construction or instead of the last one.
  void keep(const at::Tensor& tensor);
  void pack(const at::Tensor& tensor);  // by the hooks that are active
  void stash(std::shared_ptr<Stash> stash, const at::Tensor& tensor);

  // A new tensor over the value's bytes, without history; requires grad as the
  // original does.  Compute may read it.
  at::Tensor get() const;

  // False if the value already has the name.
  bool add_name(const std::string& name);
  const std::vector<std::string>& names() const { return names_; }

  const SeenVersion& version() const { return version_; }
  // Whether `tensor` shares the value's storage.
  bool shares_storage_with(const at::Tensor& tensor) const;

 private:
  struct Geometry {
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset;
  };
  at::Tensor bare() const;

  std::vector<std::string> names_;
  SeenVersion version_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage_;
  bool requires_grad_;
  at::ScalarType dtype_;
  at::Tensor kept_;
  std::optional<torch::autograd::SavedVariable> packed_;
  std::shared_ptr<Stash> stash_;
  Geometry geometry_;
};

}  // namespace lowtide::activation
