#include "shard/unit_gradients.h"

#include <ATen/ceil_div.h>

#include <algorithm>

#include "base/check.h"
#include "shard/policy.h"

namespace lowtide::shard {
namespace {

std::vector<PartialGradients::Parameter> shards_of(
    const std::vector<ParameterInfo>& infos, const ParameterBuffers& buffers) {
  std::vector<PartialGradients::Parameter> shards;
  for (std::size_t i = 0; i < infos.size(); ++i) {
    shards.push_back({buffers.slice(i).shard_numel, infos[i].reduce_dtype});
  }
  return shards;
}

}  // namespace

UnitGradients::UnitGradients(UnitName unit,
                             const std::vector<ParameterInfo>& infos,
                             const ParameterBuffers& buffers,
                             std::shared_ptr<comm::Collectives> group,
                             std::shared_ptr<memory::DeviceMemory> memory)
    : unit_(std::move(unit)),
      infos_(infos),
      group_(std::move(group)),
      memory_(std::move(memory)),
      sharded_(unit_, memory_),
      partial_(unit_, shards_of(infos, buffers), memory_) {
  for (std::size_t i = 0; i < infos_.size(); ++i) {
    Parameter parameter;
    parameter.name = infos_[i].name;
    parameter.numel = buffers.slice(i).numel();
    parameter.shard_numel = buffers.slice(i).shard_numel;
    parameters_.push_back(std::move(parameter));
  }
}

void UnitGradients::rename_parameters(const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    parameters_[i].name = names[i];
  }
}

std::int64_t UnitGradients::num_slots() const {
  return ring_slots(group_->size());
}

std::int64_t UnitGradients::num_blocks(std::int32_t i) const {
  const auto& parameter = parameters_[static_cast<std::size_t>(i)];
  const auto strip = parameter.block_rows * parameter.row_numel;
  return strip == 0 ? 0 : at::ceil_div(parameter.shard_numel, strip);
}

GradientColumns UnitGradients::block_columns(std::int32_t i,
                                             std::int64_t block) const {
  const auto& parameter = parameters_[static_cast<std::size_t>(i)];
  const auto strip = parameter.block_rows * parameter.row_numel;
  const auto width = std::min(strip, parameter.shard_numel - block * strip);
  return {group_->size(), width, group_->size() * width, 0, width};
}

GradientColumns UnitGradients::columns(std::int32_t i, std::int64_t begin,
                                       std::int64_t end) const {
  const auto& parameter = parameters_[static_cast<std::size_t>(i)];
  return {group_->size(), parameter.shard_numel, parameter.numel, begin, end};
}

std::vector<std::int32_t> UnitGradients::observed_order() const {
  auto order = completed_;
  std::vector<bool> listed(parameters_.size(), false);
  for (const auto i : order) {
    listed[static_cast<std::size_t>(i)] = true;
  }
  const auto append = [&](std::int32_t i) {
    if (!listed[static_cast<std::size_t>(i)]) {
      listed[static_cast<std::size_t>(i)] = true;
      order.push_back(i);
    }
  };
  std::for_each(trainable_.begin(), trainable_.end(), append);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    append(static_cast<std::int32_t>(i));
  }
  return order;
}

std::int64_t UnitGradients::num_chunks() const {
  std::int64_t chunks = 0;
  for (const auto& lane : lanes_) {
    chunks += static_cast<std::int64_t>(lane.plan.chunks.size());
  }
  return chunks;
}

std::int64_t UnitGradients::slot_bytes() const {
  std::int64_t most = 0;
  for (const auto& lane : lanes_) {
    most = std::max(most, (group_->size() + 1) * lane.plan.max_columns() *
                              itemsize(lane.dtype));
  }
  return most;
}

std::int64_t UnitGradients::wire_bytes() const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    bytes += group_->size() * parameters_[i].shard_numel *
             itemsize(infos_[i].reduce_dtype);
  }
  return bytes;
}

std::int64_t UnitGradients::slab_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& lane : lanes_) {
    bytes += lane.slab.bytes();
  }
  return bytes;
}

std::int64_t UnitGradients::in_place_bytes() const {
  std::int64_t all = 0;
  std::int64_t largest = 0;
  for (const auto& lane : lanes_) {
    if (lane.in_place) {
      all += lane.slab.bytes();
      largest = std::max(largest, lane.slab.bytes());
    }
  }
  return std::min(all, std::max(largest, source_bytes_));
}

void UnitGradients::begin(bool sync) {
  sync_ = sync;
  small_.clear();
  sealed_ = leaves_early_ = false;
  completed_.clear();
  for (auto& parameter : parameters_) {
    parameter.source.reset();
    parameter.blocks.clear();
    parameter.blocks_seen = 0;
    parameter.pieces_written = 0;
    parameter.fired = parameter.produced = parameter.held = false;
    parameter.added = parameter.complete = parameter.offered = false;
    parameter.used = false;
  }
}

void UnitGradients::accumulate(std::int32_t i, at::Tensor gradient) {
  if (gradient.nbytes() > kSmallGradientBytes || in_place(i)) {
    slab(i).add(i, gradient);
    return;
  }
  const auto same = [i](const auto& other) { return other.first == i; };
  if (std::any_of(small_.begin(), small_.end(), same)) {
    add_small();
  }
  small_.emplace_back(i, std::move(gradient));
}

void UnitGradients::add_small() {
  const auto small = std::exchange(small_, {});
  if (small.empty()) {
    return;
  }
  for (auto& lane : lanes_) {
    std::vector<GradientSlab::Gradient> of_lane;
    for (const auto& [i, gradient] : small) {
      if (&slab(i) == &lane.slab) {
        of_lane.emplace_back(i, gradient);
      }
    }
    if (!of_lane.empty()) {
      lane.slab.add(of_lane);
    }
  }
}

void UnitGradients::accumulate_rows(std::int32_t i, std::int64_t block,
                                    const at::Tensor& rows) {
  const auto& p = parameter(i);
  lanes_[static_cast<std::size_t>(p.lane)].slab.add_rows(
      i, block * p.block_rows * p.row_numel, block_columns(i, block), rows);
}

bool UnitGradients::waiting() const {
  return accumulating_ || !partial_.flats().empty();
}

void UnitGradients::drop(std::int32_t i) {
  auto& p = parameter(i);
  partial_.clear(i);
  if (p.lane >= 0) {
    slab(i).drop(i);
  }
}

void UnitGradients::end() {
  add_small();
  if (!sync_) {
    accumulating_ = true;
    return;
  }
  accumulating_ = false;
  for (auto& lane : lanes_) {
    lane.slab.reset();
  }
}

bool UnitGradients::used_here(std::int32_t i) const {
  const auto& p = parameters_[static_cast<std::size_t>(i)];
  return p.produced || lanes_[static_cast<std::size_t>(p.lane)].slab.touched(i);
}

bool UnitGradients::used_all(const Lane& lane) const {
  return std::all_of(lane.members.begin(), lane.members.end(),
                     [&](auto i) { return used_here(i); });
}

bool UnitGradients::used_by_any_rank(std::int32_t i) const {
  return used_here(i) || parameter(i).used;
}

void UnitGradients::abort() {
  begin(true);
  partial_.drop();
  accumulating_ = false;
  for (auto& lane : lanes_) {
    lane.slab.reset();
  }
  sharded_.abort();
}

}  // namespace lowtide::shard
