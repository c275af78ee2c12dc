// Whether shards have changed since they were gathered.
//
// Version counters tell of writes, but not of torch's foreach and fused
// optimizers on DTensors, nor of kernels that torch does not know; an optimizer
// that has stepped counts as one that has written.  Both are numbers of calls,
// not values: every rank has the same, one without rows, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/seen_version.h"

namespace lowtide::shard {

class SeenShards {
 public:
  void watch(const std::vector<at::Tensor>& tensors) {
    versions_.clear();
    for (const auto& tensor : tensors) versions_.emplace_back(tensor);
  }
  // They are gathered now, after that many steps.
  void see(std::int64_t optimizer_steps) {
    steps_ = optimizer_steps;
    for (auto& version : versions_) version.see_again();
  }
  bool changed(std::int64_t optimizer_steps) const {
    return steps_ != optimizer_steps ||
           std::any_of(versions_.begin(), versions_.end(),
                       [](const auto& version) { return version.changed(); });
  }

 private:
  std::vector<base::SeenVersion> versions_;
  std::int64_t steps_ = 0;
};

}  // namespace lowtide::shard
