// The part of GradientStream for what reduce-scatters leave: results on their
// way into `.grad`.
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "shard/gradient_rows.h"
#include "shard/gradient_stream.h"
#include "shard/storage.h"

namespace lowtide::shard {

using device::Access;
using device::Stream;

void GradientStream::land_until(std::size_t place) {
  for (; landed_ < place; ++landed_) {
    land(landed_);
  }
}

void GradientStream::land(std::size_t place) {
  auto& entry = entries_[place];
  auto& runtime = memory_->runtime();
  const device::StreamScope scope(runtime, Stream::reduce);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  ring_.reduce_has_moved();
  entry.pending->wait();
  entry.pending.reset();
  if (entry.chunk < 0) {
    land_slab(entry);
    return;
  }
  const auto& chunk = chunk_of(entry);
  const auto& lane = entry.unit->lanes()[static_cast<std::size_t>(entry.lane)];
  const auto flags =
      chunk.flags_column >= 0
          ? slice_of(entry.output, chunk.flags_column, lane.plan.num_parameters)
          : at::Tensor();
  land_row(entry, chunk.pieces, entry.output, flags);
  entry.input.reset();
  entry.output.reset();
}

// `flags`: undefined if they come with another row.
void GradientStream::land_row(Entry& entry, const std::vector<Piece>& pieces,
                              const at::Tensor& row, const at::Tensor& flags) {
  auto& unit = *entry.unit;
  auto& lane = unit.lanes()[static_cast<std::size_t>(entry.lane)];
  if (unit.reduction().of_whole_units()) {
    unit.partial().add(pieces, row);
    if (flags.defined()) {
      unit.partial().add_flags(lane.members, flags);
    }
    return;
  }
  unit.reduction().finish(row, unit.group());
  unit.sharded().land(pieces, row);
  if (flags.defined() && !unit.used_all(lane)) {
    touch(flags, Access::read);
    const auto host = flags.to(at::kCPU, at::kFloat).contiguous();
    for (const auto i : lane.members) {
      unit.note_use(i, host[i].item<float>() != 0.0F);
    }
  }
}

void GradientStream::land_slab(Entry& entry) {
  auto& unit = *entry.unit;
  auto& lane = unit.lanes()[static_cast<std::size_t>(entry.lane)];
  auto output = entry.slab_outputs.begin();
  for (const auto i : lane.members) {
    if (lane.slab.columns(i) > 0) {
      land_row(entry, {{i, 0, unit.parameter(i).shard_numel, 0}}, *output++,
               {});
    }
  }
  land_row(entry, {}, *output, *output);
  // The slab and the results go back in the compute stream's order.
  ring_.catch_up_compute();
  entry.slab_inputs.clear();
  entry.slab_outputs.clear();
  lane.slab.release_bytes();
}

// --- sums over replicas -----------------------------------------------------

// A unit's sum leaves behind the first chunk of the next one, or at the end:
// its own last chunk has had that time on the wire.  Its results are waited for
// when the sum after it leaves.
void GradientStream::start_sums(const UnitGradients* leaving) {
  while (!to_sum_.empty() && to_sum_.front().unit != leaving) {
    finish_sum();
    const auto [unit, places] = to_sum_.front();
    to_sum_.pop_front();
    land_until(places);
    const device::StreamScope scope(memory_->runtime(), Stream::reduce);
    log_.note({StepNote::What::sum, unit->number()});
    Sum sum{unit, unit->partial().take(), {}};
    for (auto& flat : sum.flats) {
      sum.pending.push_back(
          unit->reduction().over_replicas(flat.row, unit->unit()));
    }
    sum_ = std::move(sum);
  }
}

void GradientStream::finish_sum() {
  if (!sum_) {
    return;
  }
  auto sum = *std::exchange(sum_, std::nullopt);
  auto& unit = *sum.unit;
  const device::StreamScope scope(memory_->runtime(), Stream::reduce);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  ring_.reduce_has_moved();
  for (std::size_t f = 0; f < sum.flats.size(); ++f) {
    auto& [row, pieces, flags_column] = sum.flats[f];
    if (sum.pending[f]) {
      sum.pending[f]->wait();
    }
    touch(row, Access::write);
    unit.reduction().finish(row, unit.group());
    unit.sharded().land(pieces, row);
    if (std::any_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
          return !unit.used_here(piece.parameter);
        })) {
      touch(row, Access::read);
      const auto host =
          slice_of(row, flags_column, static_cast<std::int64_t>(pieces.size()))
              .to(at::kCPU, at::kFloat);
      for (std::size_t k = 0; k < pieces.size(); ++k) {
        unit.note_use(pieces[k].parameter,
                      host[static_cast<std::int64_t>(k)].item<float>() != 0.0F);
      }
    }
    const auto bytes = static_cast<std::int64_t>(row.nbytes());
    ring_.retire({row.storage()}, bytes);
    row.reset();
  }
}

// A hook may drop a gradient while `reduce` still works on it.
void GradientStream::show(UnitGradients& unit) {
  start_sums(nullptr);
  land_until(next_);
  finish_sum();
  const c10::Storage results = unit.sharded().results();
  {
    const device::StreamScope scope(memory_->runtime(), Stream::reduce);
    unit.on_landed();
  }
  ring_.reduce_has_moved();
  if (results) {
    ring_.retire({results}, static_cast<std::int64_t>(results.nbytes()));
  }
}

void GradientStream::land_sent() { land_until(next_); }

}  // namespace lowtide::shard
