// DESIGN's rule for gradients without any of lowtide: every rank keeps full
// parameters, gradients are left folds over ranks in the wire's dtype.
#pragma once

#include <vector>

#include "layers.h"

namespace lowtide::shard {

struct Scenario {
  std::vector<UnitSpec> units;
  Program program;
  // One microbatch each: whether its backward reduces.
  std::vector<bool> sync = {true};
  int num_steps = 2;
  bool offloaded = false;  // shards and gradients are on the host
  bool compared = false;   // ranks tell each other what they did
};

// The order in which the wire adds what ranks contribute to `owner`'s slice.
std::vector<std::int64_t> fold_order(std::int64_t world_size,
                                     std::int64_t owner);

struct NaiveStep {
  std::vector<std::vector<at::Tensor>> losses;  // by rank and microbatch
  // Full `.grad` in the storage dtype; undefined where it stays None.
  Parameters gradients;
  Parameters parameters;  // after the optimizer
};

// Data of microbatch m in step s.
at::Tensor input_of(const Scenario& scenario, std::int64_t rank, int step,
                    std::size_t microbatch);

// parameter -= gradient / 4, exact in every dtype's multiplication.
void optimize(const at::Tensor& parameter, const at::Tensor& gradient);

std::vector<NaiveStep> train_naively(const Scenario& scenario,
                                     std::int64_t world_size);

}  // namespace lowtide::shard
