// Whether shards have changed since they were gathered.
//
// Version counters tell of writes, but not of torch's foreach and fused
// optimizers on DTensors, nor of kernels that torch does not know; an optimizer
// that has stepped counts as one that has written.  Both are numbers of calls,
// not values: every rank has the same, one without rows, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/seen_version.h"

namespace lowtide::shard {

class SeenShards {
 public:
  // `shards`, and as many `locals` on their bytes, or none.
  void watch(const std::vector<at::Tensor>& shards,
             const std::vector<at::Tensor>& locals) {
    shards_ = shards.size();
    versions_.clear();
    for (const auto& tensor : shards) versions_.emplace_back(tensor);
    for (const auto& tensor : locals) versions_.emplace_back(tensor);
  }
  // They are gathered now, after that many steps.
  void see(std::int64_t optimizer_steps) {
    steps_ = optimizer_steps;
    for (auto& version : versions_) version.see_again();
  }
  // Version counters tell of a write to the i-th.
  bool written(std::size_t i) const {
    bool found = false;
    for (; i < versions_.size(); i += shards_) found |= versions_[i].changed();
    return found;
  }
  bool changed(std::int64_t optimizer_steps) const {
    return steps_ != optimizer_steps ||
           std::any_of(versions_.begin(), versions_.end(),
                       [](const auto& version) { return version.changed(); });
  }

 private:
  std::vector<base::SeenVersion> versions_;
  std::size_t shards_ = 0;
  std::int64_t steps_ = 0;
};

}  // namespace lowtide::shard
