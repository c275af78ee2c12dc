#include "shard/gradient_reduction.h"

namespace lowtide::shard {

using comm::Reduction;

bool GradientReduction::averages_shards(const comm::Collectives& shards) const {
  return !sum_only && (!divide_factor ||
                       *divide_factor == static_cast<double>(shards.size()));
}

Reduction GradientReduction::over_shards(
    const comm::Collectives& shards) const {
  return averages_shards(shards) ? Reduction::average : Reduction::sum;
}

void GradientReduction::finish(at::Tensor row, const comm::Collectives& shards,
                               const std::string& unit) const {
  if (replicas) {
    const bool average = !sum_only && !divide_factor;
    replicas
        ->all_reduce(row, average ? Reduction::average : Reduction::sum, unit)
        ->wait();
  }
  if (hook) {
    hook(row);
  }
  if (averages_shards(shards)) {
    return;
  }
  const auto ranks = shards.size() * (replicas ? replicas->size() : 1);
  const auto factor = divide_factor.value_or(static_cast<double>(ranks));
  if (factor != 1.0) {
    row.div_(factor);
  }
}

}  // namespace lowtide::shard
