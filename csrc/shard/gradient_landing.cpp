// The part of GradientStream for what reduce-scatters leave: results on their
// way into `.grad`.
#include <ATen/core/LegacyTypeDispatch.h>

#include "base/check.h"
#include "shard/gradient_rows.h"
#include "shard/gradient_stream.h"
#include "shard/storage.h"

namespace lowtide::shard {

using device::Access;
using device::Stream;

// With replicas landing is a collective as well, so it has the order of places,
// whichever slot a gradient that came early asks for.
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
  if (after_shards(*entry.unit, lane, chunk.pieces, entry.output, flags)) {
    entry.unit->reduction().finish(entry.output, entry.unit->group(),
                                   entry.unit->unit());
    entry.unit->sharded().land(chunk.pieces, entry.output);
    if (flags.defined()) {
      read_flags(entry, flags);
    }
  }
  entry.input.reset();
  entry.output.reset();
}

// False: the results stay with the shards.
bool GradientStream::after_shards(UnitGradients& unit, const Lane& lane,
                                  const std::vector<Piece>& pieces,
                                  const at::Tensor& row,
                                  const at::Tensor& flags) {
  if (unit.reduction().replicas) {
    unit.exchange_partial(pieces, row);
    if (flags.defined()) {
      unit.exchange_partial_flags(lane, flags);
    }
  }
  return !unit.reduction().keeps_partial();
}

void GradientStream::land_slab(Entry& entry) {
  auto& unit = *entry.unit;
  auto& lane = unit.lanes()[static_cast<std::size_t>(entry.lane)];
  auto output = entry.slab_outputs.begin();
  const auto finish = [&](const at::Tensor& row) {
    unit.reduction().finish(row, unit.group(), unit.unit());
  };
  for (const auto i : lane.members) {
    if (lane.slab.columns(i) == 0) {
      continue;
    }
    const std::vector<Piece> pieces{{i, 0, unit.parameter(i).shard_numel, 0}};
    if (after_shards(unit, lane, pieces, *output, {})) {
      finish(*output);
      unit.sharded().land(pieces, *output);
    }
    ++output;
  }
  if (after_shards(unit, lane, {}, *output, *output)) {
    finish(*output);
    read_flags(entry, *output);
  }
  // The slab and the results go back in the compute stream's order.
  ring_.catch_up_compute();
  entry.slab_inputs.clear();
  entry.slab_outputs.clear();
  lane.slab.release_bytes();
}

// The one place where the host reads a value back, and only where this rank
// left a parameter of the unit without a gradient.
void GradientStream::read_flags(Entry& entry, const at::Tensor& flags) {
  auto& lane = entry.unit->lanes()[static_cast<std::size_t>(entry.lane)];
  if (entry.unit->used_all(lane)) {
    return;
  }
  touch(flags, Access::read);
  const auto host = flags.to(at::kCPU, at::kFloat).contiguous();
  const auto* values = host.const_data_ptr<float>();
  lane.used_anywhere.assign(values, values + lane.plan.num_parameters);
}

// A hook may drop a gradient while `reduce` still works on it.
void GradientStream::show(UnitGradients& unit) {
  land_until(next_);
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
