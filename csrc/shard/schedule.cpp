#include "shard/schedule.h"

#include <algorithm>
#include <numeric>

namespace lowtide::shard {
namespace {
// Forwards that never see a backward must not grow the record for ever.
constexpr std::size_t kMaxRecorded = 1 << 14;
}  // namespace

Schedule::Schedule(std::int32_t num_units)
    : expected_(static_cast<std::size_t>(num_units)),
      places_(static_cast<std::size_t>(num_units)) {
  std::iota(expected_.begin(), expected_.end(), 0);
}

void Schedule::begin_forward() {
  entered_.clear();
  cursor_ = 0;
  if (left_.size() > kMaxRecorded) {
    end_backward();
  }
}

std::optional<std::int32_t> Schedule::enter_forward(std::int32_t unit) {
  entered_.push_back(unit);
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

void Schedule::leave_forward(std::int32_t unit, bool recorded) {
  if (recorded) {
    places_[static_cast<std::size_t>(unit)].push_back(left_.size());
    left_.push_back(unit);
  }
}

void Schedule::end_forward() { expected_ = entered_; }

std::optional<std::int32_t> Schedule::enter_backward(std::int32_t unit) {
  auto& open = places_[static_cast<std::size_t>(unit)];
  if (open.empty()) {
    return std::nullopt;
  }
  const std::size_t place = open.back();
  open.pop_back();
  if (place == 0) {
    return std::nullopt;
  }
  return left_[place - 1];
}

void Schedule::end_backward() {
  left_.clear();
  for (auto& open : places_) {
    open.clear();
  }
}

std::vector<std::int32_t> Schedule::completion_order() const {
  std::vector<std::int32_t> order;
  std::vector<bool> seen(places_.size(), false);
  for (const auto unit : left_) {
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
