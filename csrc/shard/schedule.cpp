#include "shard/schedule.h"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace lowtide::shard {
namespace {
// Forwards that never see a backward must not grow the record for ever.
constexpr std::size_t kMaxRecorded = 1 << 14;
}  // namespace

Schedule::Schedule(std::int32_t num_units)
    : expected_(static_cast<std::size_t>(num_units)),
      open_(static_cast<std::size_t>(num_units)),
      first_entered_(static_cast<std::size_t>(num_units), kNever),
      under_way_(static_cast<std::size_t>(num_units)) {
  std::iota(expected_.begin(), expected_.end(), 0);
}

void Schedule::begin_forward() {
  entered_.clear();
  cursor_ = 0;
  for (auto& calls : under_way_) calls.clear();
  if (left_.size() > kMaxRecorded) {
    end_backward();
  }
}

std::optional<std::int32_t> Schedule::enter_forward(std::int32_t unit) {
  entered_.push_back(unit);
  under_way_[static_cast<std::size_t>(unit)].push_back(left_.size());
  const auto from = expected_.begin() + static_cast<std::ptrdiff_t>(cursor_);
  const auto found = std::find(from, expected_.end(), unit);
  if (found == expected_.end()) {
    return std::nullopt;
  }
  cursor_ = static_cast<std::size_t>(found - expected_.begin()) + 1;
  if (cursor_ == expected_.size()) {
    return std::nullopt;
  }
  return expected_[cursor_];
}

void Schedule::leave_forward(std::int32_t unit, bool recorded,
                             std::int64_t call) {
  const auto u = static_cast<std::size_t>(unit);
  auto entered_at = left_.size();
  if (!under_way_[u].empty()) {
    entered_at = under_way_[u].back();
    under_way_[u].pop_back();
  }
  if (recorded) {
    first_entered_[u] = std::min(first_entered_[u], entered_at);
    open_[u].push_back({call, left_.size()});
    left_.push_back({unit, entered_at});
  }
}

void Schedule::end_forward() { expected_ = entered_; }

Schedule::BackwardCall Schedule::enter_backward(std::int32_t unit,
                                                std::int64_t call) {
  auto& open = open_[static_cast<std::size_t>(unit)];
  const auto found =
      std::find_if(open.rbegin(), open.rend(),
                   [call](const Open& one) { return one.call == call; });
  BackwardCall entered;
  if (found == open.rend()) {
    return entered;
  }
  const auto place = found->place;
  open.erase(std::next(found).base());
  entered.place = place;
  entered.last = open.empty();
  entered.alone = left_[place].entered_at == place;
  if (place > 0) {
    entered.next = left_[place - 1].unit;
  }
  return entered;
}

bool Schedule::is_over(std::int32_t unit, std::size_t place) const {
  const auto first = first_entered_[static_cast<std::size_t>(unit)];
  return first != kNever && first > place;
}

void Schedule::end_backward() {
  left_.clear();
  for (auto& open : open_) {
    open.clear();
  }
  std::fill(first_entered_.begin(), first_entered_.end(), kNever);
}

std::vector<std::int32_t> Schedule::completion_order() const {
  std::vector<std::int32_t> order;
  std::vector<bool> seen(open_.size(), false);
  for (const auto& [unit, entered_at] : left_) {
    if (!seen[static_cast<std::size_t>(unit)]) {
      seen[static_cast<std::size_t>(unit)] = true;
      order.push_back(unit);
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

void Schedule::abort() {
  entered_.clear();
  cursor_ = 0;
  end_backward();
}

}  // namespace lowtide::shard
