#include "shard/gradients/replica_sums.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace lowtide::shard {

using device::Stream;

void ReplicaSums::add(UnitGradients& unit, std::size_t places) {
  waiting_.push_back({&unit, places});
}

void ReplicaSums::start(
    const UnitGradients* leaving,
    const std::function<void(std::size_t places)>& land_until) {
  while (!waiting_.empty() && waiting_.front().unit != leaving) {
    finish();
    const auto [unit, places] = waiting_.front();
    waiting_.pop_front();
    land_until(places);
    const device::StreamScope scope(memory_.runtime(), Stream::reduce);
    log_.note({StepNote::What::sum, unit->number()});
    Sum sum{unit, unit->partial().take(), {}};
    for (auto& flat : sum.flats) {
      sum.pending.push_back(
          unit->reduction().over_replicas(flat.row, unit->unit()));
    }
    sum_ = std::move(sum);
  }
}

void ReplicaSums::finish() {
  if (!sum_) {
    return;
  }
  auto sum = *std::exchange(sum_, std::nullopt);
  auto& runtime = memory_.runtime();
  const device::StreamScope scope(runtime, Stream::reduce);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  ring_.reduce_has_moved();
  for (std::size_t f = 0; f < sum.flats.size(); ++f) {
    auto& [row, pieces, flags_column] = sum.flats[f];
    if (sum.pending[f]) {
      sum.pending[f]->wait();
    }
    runtime.touches(runtime.current(), row.const_data_ptr(), row.nbytes(),
                    device::Access::write);
    sum.unit->land_sum(row, pieces, flags_column);
    const auto bytes = static_cast<std::int64_t>(row.nbytes());
    ring_.retire({row.storage()}, bytes);
    row.reset();
  }
  sum.unit->all_landed(ring_);
}

std::vector<comm::Pending*> ReplicaSums::in_flight() const {
  std::vector<comm::Pending*> pending;
  if (sum_) {
    for (const auto& of_flat : sum_->pending) pending.push_back(of_flat.get());
  }
  return pending;
}

void ReplicaSums::clear() {
  waiting_.clear();
  sum_.reset();
}

}  // namespace lowtide::shard
