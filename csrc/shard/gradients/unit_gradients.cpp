#include "shard/gradients/unit_gradients.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "shard/policy.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

std::vector<PartialGradients::Parameter> shards_of(
    const ParameterInfos& infos, const memory::FlatLayout& layout) {
  std::vector<PartialGradients::Parameter> shards;
  for (std::size_t i = 0; i < infos.size(); ++i) {
    shards.push_back({layout[i].shard_numel, infos[i].reduce_dtype});
  }
  return shards;
}

}  // namespace

UnitGradients::UnitGradients(UnitName unit, ParameterInfos infos,
                             const memory::FlatLayout& layout,
                             std::shared_ptr<comm::Collectives> group,
                             const GradientReduction& reduction,
                             std::shared_ptr<memory::DeviceMemory> memory,
                             std::shared_ptr<memory::HostMemory> host)
    : unit_(std::move(unit)),
      infos_(std::move(infos)),
      group_(std::move(group)),
      memory_(std::move(memory)),
      order_(infos_.size()),
      sharded_(unit_, memory_, std::move(host)),
      partial_(unit_, shards_of(infos_, layout), memory_),
      used_elsewhere_(unit_, memory_),
      reduction_(reduction) {
  std::iota(order_.rbegin(), order_.rend(), 0);
  for (std::size_t i = 0; i < infos_.size(); ++i) {
    Parameter parameter;
    parameter.numel = layout[i].numel();
    parameter.shard_numel = layout[i].shard_numel;
    parameters_.push_back(std::move(parameter));
  }
}

// --- the plan ---------------------------------------------------------------

void UnitGradients::plan(const std::vector<bool>& trainable,
                         std::int64_t budget_bytes) {
  LOWTIDE_INVARIANT(!accumulating_, "a plan changes only between reductions");
  trainable_.clear();
  lanes_.clear();
  source_bytes_ = 0;
  auto takes_part = trainable;
  takes_part.resize(parameters_.size());  // none of a unit without tensors
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    parameter.lane = -1;
    parameter.places.clear();
    takes_part[i] =
        takes_part[i] || partial_.holds(static_cast<std::int32_t>(i));
    if (parameter.rows.numel > 0) {
      // A block fills a chunk, so that its gradient leaves when it is there.
      const auto columns =
          columns_for_budget(budget_bytes, slots_for_rows(num_slots()),
                             group_->size(), itemsize(infos_[i].reduce_dtype));
      parameter.rows.at_once =
          std::max<std::int64_t>(1, columns / parameter.rows.numel);
    }
  }
  add_lanes(takes_part, budget_bytes);
}

// [Note: Frozen or not in between]
// As in FSDP2, a parameter that is frozen while gradients wait for a reduction
// keeps what it has, and one that is not frozen any more begins with nothing.
// Slabs stay as they are: what the first leaves is no gradient, the second has
// a slab of its own until the next plan.  So does one that is not frozen any
// more when a backward begins; it may be that of a forward before.
void UnitGradients::extend_plan(const std::vector<bool>& trainable,
                                std::int64_t budget_bytes) {
  auto lacks_lane = trainable;
  lacks_lane.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    lacks_lane[i] = lacks_lane[i] && parameters_[i].lane < 0;
  }
  add_lanes(lacks_lane, budget_bytes);
}

bool UnitGradients::plans_all(const std::vector<bool>& trainable) const {
  for (std::size_t i = 0; i < trainable.size(); ++i) {
    if (trainable[i] && parameters_[i].lane < 0) return false;
  }
  return true;
}

bool UnitGradients::plans_only(const std::vector<bool>& trainable) const {
  return std::all_of(trainable_.begin(), trainable_.end(), [&](auto i) {
    return trainable[static_cast<std::size_t>(i)];
  });
}

void UnitGradients::add_lanes(const std::vector<bool>& takes_part,
                              std::int64_t budget_bytes) {
  std::vector<GradientShape> shapes;
  std::vector<std::int64_t> shard_numel;
  std::vector<std::int64_t> numel;
  for (std::size_t k = 0; k < parameters_.size(); ++k) {
    const auto& one = parameters_[k];
    shapes.push_back({infos_[k].reduce_dtype, one.numel, one.shard_numel,
                      one.rows.strip(), one.fused});
    shard_numel.push_back(one.shard_numel);
    numel.push_back(one.numel);
  }
  for (const auto i : order_) {
    const auto k = static_cast<std::size_t>(i);
    if (takes_part[k]) {
      trainable_.push_back(i);
      source_bytes_ +=
          shapes[k].strip > 0
              ? 2 * group_->size() * shapes[k].strip * itemsize(shapes[k].dtype)
              : numel[k] * itemsize(infos_[k].compute_dtype);
    }
  }
  for (auto& planned : plan_lanes(shapes, takes_part, order_, budget_bytes,
                                  num_slots(), group_->size())) {
    for (const auto i : planned.members) {
      parameter(i).lane = static_cast<std::int32_t>(lanes_.size());
    }
    const auto& chunks = planned.plan.chunks;
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      for (std::size_t p = 0; p < chunks[c].pieces.size(); ++p) {
        parameter(chunks[c].pieces[p].parameter)
            .places.push_back(
                {static_cast<std::int32_t>(c), static_cast<std::int32_t>(p)});
      }
    }
    GradientSlab slab(unit_, planned.dtype, group_->size(), shard_numel, numel,
                      planned.members, memory_);
    lanes_.push_back({planned.dtype,
                      std::move(planned.members),
                      std::move(planned.plan),
                      std::move(slab),
                      {},
                      planned.in_place});
  }
}

std::int64_t UnitGradients::num_blocks(std::int32_t i) const {
  const auto& parameter = parameters_[static_cast<std::size_t>(i)];
  const auto strip = parameter.rows.strip();
  return strip == 0 ? 0 : at::ceil_div(parameter.shard_numel, strip);
}

GradientColumns UnitGradients::block_columns(std::int32_t i,
                                             std::int64_t block) const {
  const auto& parameter = parameters_[static_cast<std::size_t>(i)];
  const auto strip = parameter.rows.strip();
  const auto width = std::min(strip, parameter.shard_numel - block * strip);
  return {group_->size(), width, group_->size() * width, 0, width};
}

GradientColumns UnitGradients::columns(std::int32_t i, std::int64_t begin,
                                       std::int64_t end) const {
  const auto& parameter = parameters_[static_cast<std::size_t>(i)];
  return {group_->size(), parameter.shard_numel, parameter.numel, begin, end};
}

std::vector<std::int64_t> UnitGradients::elements() const {
  std::vector<std::int64_t> elements;
  for (const auto i : trainable_) {
    elements.push_back(elements_every_token_uses(infos_.of(i).sizes));
  }
  return elements;
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

bool UnitGradients::of_experts() const {
  std::int64_t all = 0;
  std::int64_t used = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    all += parameters_[i].numel;
    used += elements_every_token_uses(infos_[i].sizes);
  }
  return 2 * used < all;
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

// --- a backward -------------------------------------------------------------

void UnitGradients::Parameter::begin() {
  arrival = Arrival::awaited;
  product = Product::none;
  source.reset();
  pieces_written = 0;
  rows.seen = 0;
  rows.blocks.clear();
}

bool UnitGradients::Parameter::next_piece_is_for(std::int32_t chunk,
                                                 bool sealed) const {
  const auto next = static_cast<std::size_t>(pieces_written);
  const bool here = source.defined() || next < rows.blocks.size();
  return here && next < places.size() && places[next].chunk == chunk &&
         (arrival != Arrival::held || sealed);
}

bool UnitGradients::Parameter::waits_as_small() const {
  return source.defined() && source.nbytes() <= kSmallGradientBytes;
}

const at::Tensor& UnitGradients::Parameter::next_source() const {
  return source.defined()
             ? source
             : rows.blocks[static_cast<std::size_t>(pieces_written)];
}

at::Tensor UnitGradients::Parameter::piece_written_from() {
  const auto next = static_cast<std::size_t>(pieces_written++);
  if (!source.defined()) {
    return std::exchange(rows.blocks[next], at::Tensor());
  }
  return next + 1 == places.size() ? std::exchange(source, at::Tensor())
                                   : at::Tensor();
}

void UnitGradients::begin(bool sync) {
  sync_ = sync;
  small_.clear();
  sealed_ = leaves_early_ = hosts_tell_ = false;
  lingering_bytes_ = 0;
  completed_.clear();
  used_elsewhere_.begin();
  for (auto& parameter : parameters_) {
    parameter.begin();
  }
}

void UnitGradients::arrives(std::int32_t i, bool hold) {
  auto& arrival = parameter(i).arrival;
  if (arrival == Arrival::awaited) {
    completed_.push_back(i);
  }
  arrival =
      hold || arrival == Arrival::held ? Arrival::held : Arrival::complete;
}

bool UnitGradients::prepare_results() {
  const bool leased =
      reduction_.of_whole_units() && partial_.prepare(trainable_);
  if (reduction_.keeps_partial() || sharded_.prepared()) {
    return leased;
  }
  sharded_.prepare(trainable_);
  return true;
}

void UnitGradients::land(const Lane& lane, const std::vector<Piece>& pieces,
                         const at::Tensor& row, const at::Tensor& flags) {
  if (reduction_.of_whole_units()) {
    partial_.add(pieces, row);
    if (flags.defined()) {
      partial_.add_flags(lane.members, flags);
    }
    return;
  }
  reduction_.finish(row, *group_);
  sharded_.land(pieces, row);
  if (flags.defined()) ask_who_used(lane.members, lane.members, flags);
}

// Those that this rank has a gradient of are known.
void UnitGradients::ask_who_used(const std::vector<std::int32_t>& parameters,
                                 const std::vector<std::int32_t>& columns,
                                 const at::Tensor& flags) {
  std::vector<std::int32_t> absent;
  std::vector<std::int32_t> their_columns;
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    if (used_here(parameters[k])) continue;
    absent.push_back(parameters[k]);
    their_columns.push_back(columns[k]);
  }
  if (absent.empty() || reduction_.unused_too) return;
  if (hosts_tell_) {
    used_elsewhere_.expect(std::move(absent), std::move(their_columns), flags);
  } else {
    used_elsewhere_.ask(std::move(absent), std::move(their_columns), flags);
  }
}

void UnitGradients::require_as_captured() const {
  if (const auto i = used_elsewhere_.changed()) {
    throw Error(base::error_text(
        base::concat("parameter '", name_of(*i), "'"),
        "gradients on the ranks that had one when the step was captured",
        "a replay of the graph in which others have one",
        "Capture the step anew where ranks use other parameters; the optimizer "
        "has stepped without what this rank was not told of."));
  }
}

void UnitGradients::land_sum(const at::Tensor& row,
                             const std::vector<Piece>& pieces,
                             std::int64_t flags_column) {
  reduction_.finish(row, *group_);
  sharded_.land(pieces, row);
  std::vector<std::int32_t> summed;
  for (const auto& piece : pieces) summed.push_back(piece.parameter);
  if (std::ranges::all_of(summed, [&](auto i) { return used_here(i); })) return;
  std::vector<std::int32_t> columns(summed.size());
  std::iota(columns.begin(), columns.end(), 0);
  ask_who_used(
      summed, columns,
      slice_of(row, flags_column, static_cast<std::int64_t>(columns.size())));
}

void UnitGradients::all_landed(GradientRing& ring) {
  if (auto leaving = sharded_.leave_device()) {
    ring.retire(std::move(leaving->storage), std::move(leaving->copied));
  }
}

// AccumulateGrad of FSDP2 adds in the dtype that gradients arrive in, which a
// unit may reduce in a wider one of others.
void UnitGradients::add(GradientSlab& slab,
                        const std::vector<GradientSlab::Gradient>& gradients) {
  std::vector<std::int32_t> rounded;
  for (const auto& [i, gradient] : gradients) {
    const auto& info = infos_.of(i);
    if (slab.touched(i) && info.dtype_on_arrival() != info.reduce_dtype) {
      rounded.push_back(i);
    }
  }
  slab.add(gradients);
  for (const auto i : rounded) {
    slab.round_sum(i, infos_.of(i).dtype_on_arrival());
  }
}

void UnitGradients::accumulate(std::int32_t i, at::Tensor gradient) {
  if (gradient.nbytes() > kSmallGradientBytes || in_place(i)) {
    add(slab(i), {{i, std::move(gradient)}});
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
      add(lane.slab, of_lane);
    }
  }
}

void UnitGradients::accumulate_rows(std::int32_t i, std::int64_t block,
                                    const at::Tensor& rows) {
  const auto& p = parameter(i);
  lanes_[static_cast<std::size_t>(p.lane)].slab.add_rows(
      i, block * p.rows.strip(), block_columns(i, block), rows);
}

bool UnitGradients::waiting() const {
  return accumulating_ || !partial_.flats().empty();
}

std::vector<at::Tensor> UnitGradients::waiting_buffers() const {
  std::vector<at::Tensor> buffers;
  for (const auto& lane : lanes_) {
    if (lane.slab.allocated()) buffers.push_back(lane.slab.buffer());
  }
  for (const auto& flat : partial_.flats()) buffers.push_back(flat.row);
  return buffers;
}

UnitGradients::Waiting UnitGradients::waiting(std::int32_t i) const {
  Waiting waiting;
  waiting.accumulating = accumulating_;
  if (touched(i)) {
    const auto lane = static_cast<std::size_t>(parameter(i).lane);
    waiting.unreduced = lanes_[lane].slab.read(i);
  }
  if (partial_.holds(i)) {
    waiting.partial = partial_.read(i);
  }
  return waiting;
}

void UnitGradients::bring_back(std::int32_t i, const Waiting& waiting) {
  if (waiting.accumulating) {
    begin(/*sync=*/false);
    if (waiting.unreduced.defined()) {
      LOWTIDE_INVARIANT(parameter(i).lane >= 0, "it is in the plan");
      accumulate(i, waiting.unreduced);
    }
    end();
  }
  if (waiting.partial.defined()) {
    LOWTIDE_INVARIANT(parameter(i).lane >= 0, "it is in the plan");
    partial_.prepare(trainable_);
    partial_.add(i, waiting.partial);
  }
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
  accumulating_ = hosts_tell_ = false;
  for (auto& lane : lanes_) {
    lane.slab.reset();
  }
}

bool UnitGradients::used_here(std::int32_t i) const {
  const auto& p = parameters_[static_cast<std::size_t>(i)];
  return p.produced() ||
         lanes_[static_cast<std::size_t>(p.lane)].slab.touched(i);
}

bool UnitGradients::publish(const std::vector<bool>& in_any_case,
                            const ShardedGradients::Wrap& wrap) {
  if (!sharded_.prepared()) {
    return false;
  }
  const auto elsewhere = used_elsewhere_.parameters();
  std::vector<std::int32_t> used;
  for (const auto i : trainable_) {
    const bool wanted =
        !in_any_case.empty() && in_any_case[static_cast<std::size_t>(i)];
    if (wanted || used_here(i) || elsewhere.contains(i)) {
      used.push_back(i);
    }
  }
  std::sort(used.begin(), used.end());
  sharded_.publish(used, wrap);
  return !used.empty();
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
