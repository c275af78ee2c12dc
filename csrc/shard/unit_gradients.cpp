#include "shard/unit_gradients.h"

#include <ATen/ceil_div.h>

#include <algorithm>

#include "base/check.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

// In the order their first parameter is expected.
struct LaneMembers {
  at::ScalarType dtype;
  bool in_place;
  std::vector<std::int32_t> members;
};

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
      sharded_(unit_, memory_) {
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

void UnitGradients::plan(const std::vector<bool>& trainable,
                         const std::vector<std::int32_t>& order,
                         std::int64_t budget_bytes) {
  LOWTIDE_INVARIANT(!accumulating_, "a plan changes only between reductions");
  trainable_.clear();
  lanes_.clear();
  source_bytes_ = 0;
  choose_blocks(budget_bytes);
  std::vector<std::int64_t> shard_numel;
  std::vector<std::int64_t> numel;
  std::vector<std::int64_t> strips;
  for (auto& parameter : parameters_) {
    parameter.lane = -1;
    parameter.places.clear();
    strips.push_back(parameter.block_rows * parameter.row_numel);
    shard_numel.push_back(parameter.shard_numel);
    numel.push_back(parameter.numel);
  }
  std::vector<LaneMembers> groups;
  for (const auto i : order) {
    const auto k = static_cast<std::size_t>(i);
    if (!trainable[k]) {
      continue;
    }
    trainable_.push_back(i);
    const auto dtype = infos_[k].reduce_dtype;
    source_bytes_ += strips[k] > 0
                         ? 2 * group_->size() * strips[k] * itemsize(dtype)
                         : numel[k] * itemsize(infos_[k].compute_dtype);
    const bool in_place = parameters_[k].fused && strips[k] == 0;
    auto group = std::find_if(groups.begin(), groups.end(), [&](auto& g) {
      return !in_place && !g.in_place && g.dtype == dtype;
    });
    if (group == groups.end()) {
      group = groups.insert(groups.end(), {dtype, in_place, {}});
    }
    group->members.push_back(i);
  }
  // What is left at the end of the unit's backward would hold up the others.
  std::stable_partition(groups.begin(), groups.end(),
                        [](const auto& group) { return group.in_place; });
  for (auto& [dtype, in_place, members] : groups) {
    for (const auto i : members) {
      parameter(i).lane = static_cast<std::int32_t>(lanes_.size());
    }
    const auto columns = columns_for_budget(budget_bytes, num_slots(),
                                            group_->size(), itemsize(dtype));
    auto plan =
        plan_unit(shard_numel, in_place ? std::vector<std::int32_t>() : members,
                  columns, strips);
    for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
      const auto& pieces = plan.chunks[c].pieces;
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        parameter(pieces[p].parameter)
            .places.push_back(
                {static_cast<std::int32_t>(c), static_cast<std::int32_t>(p)});
      }
    }
    GradientSlab slab(unit_, dtype, group_->size(), shard_numel, numel, members,
                      memory_);
    lanes_.push_back({dtype,
                      std::move(members),
                      std::move(plan),
                      std::move(slab),
                      {},
                      {},
                      in_place});
  }
}

std::int64_t UnitGradients::num_slots() const {
  return GradientRing::num_slots(group_->size());
}

// A block fills a chunk, so that its gradient leaves as soon as it is there.
void UnitGradients::choose_blocks(std::int64_t budget_bytes) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    if (parameter.row_numel > 0) {
      const auto columns =
          columns_for_budget(budget_bytes, num_slots(), group_->size(),
                             itemsize(infos_[i].reduce_dtype));
      parameter.block_rows =
          std::max<std::int64_t>(1, columns / parameter.row_numel);
    }
  }
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
  sealed_ = false;
  completed_.clear();
  for (auto& parameter : parameters_) {
    parameter.source.reset();
    parameter.blocks.clear();
    parameter.blocks_seen = 0;
    parameter.pieces_written = 0;
    parameter.fired = parameter.produced = parameter.held = false;
    parameter.added = parameter.complete = parameter.offered = false;
  }
  for (auto& lane : lanes_) {
    lane.used_anywhere.clear();
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
  if (!reduction_.keeps_partial()) {
    drop_partial();
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
  if (used_here(i)) {
    return true;
  }
  const auto& parameter = parameters_[static_cast<std::size_t>(i)];
  const auto& flags =
      lanes_[static_cast<std::size_t>(parameter.lane)].used_anywhere;
  return !flags.empty() && flags[static_cast<std::size_t>(i)] != 0.0F;
}

// [Note: Partial gradients]
// FSDP2 keeps one flat tensor a unit; here a parameter's slice is kept by
// itself, because two backwards may cut the unit differently.  Untouched
// elements are -0.0, so that keeping is adding from the first time on.
at::Tensor& UnitGradients::partial_of(std::int32_t i) {
  auto& p = parameter(i);
  if (!p.partial.defined()) {
    const auto dtype = infos_[static_cast<std::size_t>(i)].reduce_dtype;
    const auto bytes = (p.shard_numel + 1) * itemsize(dtype);
    const auto storage = owning_storage(
        memory_->lease(memory::Category::sharded_gradients, *unit_, bytes),
        bytes);
    p.partial = flat_view(storage, dtype, 0, p.shard_numel);
    p.partial_flag =
        flat_view(storage, dtype, p.shard_numel * itemsize(dtype), 1);
    p.partial.fill_(-0.0);
    p.partial_flag.fill_(-0.0);
  }
  return p.partial;
}

void UnitGradients::drop_partial() {
  for (auto& p : parameters_) {
    p.partial.reset();
    p.partial_flag.reset();
  }
}

void UnitGradients::exchange_partial(const std::vector<Piece>& pieces,
                                     const at::Tensor& row) {
  for (const auto& piece : pieces) {
    const auto of_row = slice_of(row, piece.column, piece.size());
    if (!reduction_.all_reduce) {
      slice_of(partial_of(piece.parameter), piece.begin, piece.size())
          .add_(of_row);
    } else if (const auto& kept = parameter(piece.parameter).partial;
               kept.defined()) {
      of_row.add_(slice_of(kept, piece.begin, piece.size()));
    }
  }
}

void UnitGradients::exchange_partial_flags(const Lane& lane,
                                           const at::Tensor& flags) {
  for (const auto i : lane.members) {
    const auto flag = slice_of(flags, i, 1);
    if (!reduction_.all_reduce) {
      partial_of(i);
      parameter(i).partial_flag.add_(flag);
    } else if (parameter(i).partial_flag.defined()) {
      flag.add_(parameter(i).partial_flag);
    }
  }
}

void UnitGradients::abort() {
  begin(true);
  drop_partial();
  accumulating_ = false;
  for (auto& lane : lanes_) {
    lane.slab.reset();
  }
  sharded_.abort();
}

}  // namespace lowtide::shard
