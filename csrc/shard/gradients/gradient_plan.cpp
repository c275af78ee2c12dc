#include "shard/gradients/gradient_plan.h"

#include <ATen/ceil_div.h>

#include <algorithm>

#include "base/check.h"

namespace lowtide::shard {
namespace {

using at::round_up;

// Fills chunks one after another.
class Cutter {
 public:
  // Parameters of up to `uncut` columns stay whole.
  Cutter(UnitPlan& plan, std::int64_t max_columns, std::int64_t uncut)
      : plan_(plan), max_columns_(max_columns), uncut_(uncut) {}

  void add(std::int32_t parameter, std::int64_t numel) {
    const bool stays_whole = numel <= uncut_;
    std::int64_t begin = 0;
    while (begin < numel) {
      const std::int64_t room = plan_.chunks.empty() ? 0 : max_columns_ - used_;
      if (room <= 0 || (stays_whole && numel > room)) {
        open();
        continue;
      }
      const std::int64_t end = std::min(numel, begin + room);
      plan_.chunks.back().pieces.push_back({parameter, begin, end, used_});
      used_ = round_up(used_ + end - begin, kPieceColumnMultiple);
      begin = end;
    }
  }

  void add_in_strips(std::int32_t parameter, std::int64_t numel,
                     std::int64_t strip) {
    for (std::int64_t begin = 0; begin < numel; begin += strip) {
      open();
      const std::int64_t end = std::min(numel, begin + strip);
      plan_.chunks.back().pieces.push_back({parameter, begin, end, 0});
      used_ = round_up(end - begin, kPieceColumnMultiple);
    }
  }

  void finish() {
    if (plan_.chunks.empty()) {
      open();
    }
    plan_.chunks.back().flags_column = used_;
    used_ += plan_.num_parameters;
    close();
  }

 private:
  void open() {
    close();
    plan_.chunks.emplace_back();
    used_ = 0;
  }
  void close() {
    if (!plan_.chunks.empty()) {
      plan_.chunks.back().columns = round_up(used_, kChunkColumnMultiple);
    }
  }

  UnitPlan& plan_;
  std::int64_t max_columns_;
  std::int64_t uncut_;
  std::int64_t used_ = 0;
};

struct Cut {
  std::int64_t max_columns;
  std::int64_t uncut;
};

// Into as few chunks as `max_columns` allows, but for parameters with fixed
// strips.  What stays whole may leave so much of a chunk empty as all of them
// have to spare.
Cut even_cut(const std::vector<std::int64_t>& shard_numel,
             const std::vector<std::int32_t>& order, std::int64_t max_columns,
             const std::vector<std::int64_t>& strips) {
  std::int64_t columns = 0;
  for (const auto parameter : order) {
    const auto p = static_cast<std::size_t>(parameter);
    if (p >= strips.size() || strips[p] == 0) {
      columns += round_up(shard_numel[p], kPieceColumnMultiple);
    }
  }
  if (columns <= max_columns) {
    return {max_columns, max_columns};
  }
  const auto uncut = std::min(max_columns / 8, kUncutColumns);
  const auto even = at::ceil_div(columns, at::ceil_div(columns, max_columns));
  max_columns =
      std::min(max_columns, round_up(even + uncut, kChunkColumnMultiple));
  return {max_columns, std::min(uncut, max_columns - even)};
}

}  // namespace

std::int64_t UnitPlan::max_columns() const {
  std::int64_t most = 0;
  for (const auto& chunk : chunks) {
    most = std::max(most, chunk.columns);
  }
  return most;
}

UnitPlan plan_unit(const std::vector<std::int64_t>& shard_numel,
                   const std::vector<std::int32_t>& order,
                   std::int64_t max_columns,
                   const std::vector<std::int64_t>& strips, bool evenly) {
  UnitPlan plan;
  plan.num_parameters = static_cast<std::int64_t>(shard_numel.size());
  if (order.empty()) {
    return plan;
  }
  max_columns =
      std::max(kChunkColumnMultiple,
               max_columns / kChunkColumnMultiple * kChunkColumnMultiple);
  for (const auto parameter : order) {
    LOWTIDE_INVARIANT(parameter >= 0 && parameter < plan.num_parameters,
                      "gradient order names a parameter of the unit");
  }
  const auto cut = evenly ? even_cut(shard_numel, order, max_columns, strips)
                          : Cut{max_columns, max_columns};
  Cutter cutter(plan, cut.max_columns, cut.uncut);
  for (const auto parameter : order) {
    const auto p = static_cast<std::size_t>(parameter);
    if (p < strips.size() && strips[p] > 0) {
      cutter.add_in_strips(parameter, shard_numel[p], strips[p]);
    } else {
      cutter.add(parameter, shard_numel[p]);
    }
  }
  cutter.finish();
  return plan;
}

std::int64_t columns_for_budget(std::int64_t budget_bytes,
                                std::int64_t num_slots, std::int64_t world_size,
                                std::int64_t itemsize) {
  const std::int64_t columns =
      budget_bytes / (num_slots * (world_size + 1) * itemsize);
  return std::max(kChunkColumnMultiple,
                  columns / kChunkColumnMultiple * kChunkColumnMultiple);
}

}  // namespace lowtide::shard
