// What a unit's gradients go through between their ranks and `.grad`: the sum
// over the ranks they are sharded over, then, if the mesh has replicas, over
// those, then the user's hook and a division.
//
// As in FSDP2: by default both sums are averages.  A divide factor, or sums
// asked for by the user, make them sums with one division at the end; a factor
// equal to the number of shards is an average over those and a sum over the
// replicas.  In fp16, where a sum of many may overflow and a quotient vanish,
// both are sums, divided by about the root of the factor before and by the rest
// of it behind.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/collectives.h"

namespace lowtide::shard {

struct GradientReduction {
  // Settings, between steps; the same on every rank.
  std::shared_ptr<comm::Collectives> replicas;  // null: a 1-D mesh
  std::optional<double> divide_factor;
  bool sum_only = false;
  // Without, results stay with the shards until a backward with it.
  bool all_reduce = true;
  // A parameter without a gradient is reduced as zeros and gets what others
  // have, or zeros: nobody asks who has one.
  bool unused_too = false;
  // Changes a reduced row in place, on the current stream; may take the GIL.
  std::function<void(const at::Tensor&)> hook;

  bool keeps_partial() const { return replicas && !all_reduce; }
  // What follows acts on all of a unit at once (partial_gradients.h).
  bool of_whole_units() const { return replicas || hook; }
  comm::Reduction over_shards(const comm::Collectives& shards,
                              at::ScalarType dtype) const;
  // The division before the reduce-scatter: in place, on the current stream.
  void prepare(const at::Tensor& input, const comm::Collectives& shards) const;
  // The sum over replicas, in place, from the current stream; null without
  // replicas.
  std::unique_ptr<comm::Pending> over_replicas(at::Tensor& row,
                                               const std::string& unit) const;
  // What follows the sums: in place, on the current stream.
  void finish(at::Tensor row, const comm::Collectives& shards) const;

 private:
  bool averages_shards(const comm::Collectives& shards,
                       at::ScalarType dtype) const;
  double factor(const comm::Collectives& shards) const;
};

}  // namespace lowtide::shard
