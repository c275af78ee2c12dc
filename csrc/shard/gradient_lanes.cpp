// The part of UnitGradients that plans: which parameter is in which lane.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "shard/unit_gradients.h"

namespace lowtide::shard {

void UnitGradients::plan(const std::vector<bool>& trainable,
                         const std::vector<std::int32_t>& order,
                         std::int64_t budget_bytes) {
  LOWTIDE_INVARIANT(!accumulating_, "a plan changes only between reductions");
  trainable_.clear();
  lanes_.clear();
  source_bytes_ = 0;
  choose_blocks(budget_bytes);
  auto takes_part = trainable;
  takes_part.resize(parameters_.size());  // none of a unit without tensors
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].lane = -1;
    parameters_[i].places.clear();
    takes_part[i] =
        takes_part[i] || partial_.holds(static_cast<std::int32_t>(i));
  }
  add_lanes(takes_part, order, budget_bytes);
}

// [Note: Frozen or not in between]
// As in FSDP2, a parameter that is frozen while gradients wait for a reduction
// keeps what it has, and one that is not frozen any more begins with nothing.
// Slabs stay as they are: what the first leaves is no gradient, the second has
// a slab of its own until the next plan.  So does one that is not frozen any
// more when a backward begins; it may be that of a forward before.
void UnitGradients::extend_plan(const std::vector<bool>& trainable,
                                const std::vector<std::int32_t>& order,
                                std::int64_t budget_bytes) {
  auto lacks_lane = trainable;
  lacks_lane.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    lacks_lane[i] = lacks_lane[i] && parameters_[i].lane < 0;
  }
  add_lanes(lacks_lane, order, budget_bytes);
}

bool UnitGradients::plans_only(const std::vector<bool>& trainable) const {
  return std::all_of(trainable_.begin(), trainable_.end(), [&](auto i) {
    return trainable[static_cast<std::size_t>(i)];
  });
}

void UnitGradients::add_lanes(const std::vector<bool>& takes_part,
                              const std::vector<std::int32_t>& order,
                              std::int64_t budget_bytes) {
  std::vector<std::int64_t> shard_numel;
  std::vector<std::int64_t> numel;
  std::vector<std::int64_t> strips;
  for (const auto& parameter : parameters_) {
    strips.push_back(parameter.block_rows * parameter.row_numel);
    shard_numel.push_back(parameter.shard_numel);
    numel.push_back(parameter.numel);
  }
  // In the order their first parameter is expected.
  struct Members {
    at::ScalarType dtype;
    bool in_place;
    std::vector<std::int32_t> members;
  };
  std::vector<Members> groups;
  for (const auto i : order) {
    const auto k = static_cast<std::size_t>(i);
    if (!takes_part[k]) {
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
                      in_place});
  }
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

}  // namespace lowtide::shard
