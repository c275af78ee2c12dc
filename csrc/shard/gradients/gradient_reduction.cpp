#include "shard/gradients/gradient_reduction.h"

#include <cmath>

namespace lowtide::shard {

using comm::Reduction;

namespace {

bool may_overflow(at::ScalarType dtype) { return dtype == at::kHalf; }

// FSDP2's: the first power of two that does not divide the factor or reaches
// its root.
double divisor_before(double factor) {
  double before = 1;
  while (std::fmod(factor, before) == 0 && factor / before > before) {
    before *= 2;
  }
  return before;
}

void divide(const at::Tensor& tensor, double by) {
  if (by != 1.0) tensor.div_(by);
}

}  // namespace

bool GradientReduction::averages_shards(const comm::Collectives& shards,
                                        at::ScalarType dtype) const {
  return !sum_only && !may_overflow(dtype) &&
         (!divide_factor ||
          *divide_factor == static_cast<double>(shards.size()));
}

double GradientReduction::factor(const comm::Collectives& shards) const {
  const auto ranks = shards.size() * (replicas ? replicas->size() : 1);
  return divide_factor.value_or(static_cast<double>(ranks));
}

Reduction GradientReduction::over_shards(const comm::Collectives& shards,
                                         at::ScalarType dtype) const {
  return averages_shards(shards, dtype) ? Reduction::average : Reduction::sum;
}

void GradientReduction::prepare(const at::Tensor& input,
                                const comm::Collectives& shards) const {
  if (may_overflow(input.scalar_type())) {
    divide(input, divisor_before(factor(shards)));
  }
}

std::unique_ptr<comm::Pending> GradientReduction::over_replicas(
    at::Tensor& row, const std::string& unit) const {
  if (!replicas) {
    return nullptr;
  }
  const bool average =
      !sum_only && !divide_factor && !may_overflow(row.scalar_type());
  return replicas->all_reduce(
      row, average ? Reduction::average : Reduction::sum, unit);
}

void GradientReduction::finish(at::Tensor row,
                               const comm::Collectives& shards) const {
  const auto dtype = row.scalar_type();
  if (hook) {
    hook(row);
  }
  if (!averages_shards(shards, dtype)) {
    const double whole = factor(shards);
    divide(row, may_overflow(dtype) ? whole / divisor_before(whole) : whole);
  }
}

}  // namespace lowtide::shard
