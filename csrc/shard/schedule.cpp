#include "shard/schedule.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

namespace lowtide::shard {
namespace {
// Forwards that never see a backward must not grow the record for ever.
constexpr std::size_t kMaxRecorded = 1 << 14;
}  // namespace

Schedule::Schedule(std::int32_t num_units)
    : open_(static_cast<std::size_t>(num_units)),
      first_entered_(static_cast<std::size_t>(num_units), kNever),
      under_way_(static_cast<std::size_t>(num_units)) {
  for (std::int32_t unit = 0; unit < num_units; ++unit) {
    registered_.push_back({unit, 0});
  }
}

void Schedule::begin_forward() {
  entered_.clear();
  cursor_ = depth_ = 0;
  for (auto& calls : under_way_) calls.clear();
  if (left_.size() > kMaxRecorded) {
    forget_forwards();
  }
  begins_ = true;
}

std::vector<std::int32_t> Schedule::enter_forward(std::int32_t unit) {
  entered_.push_back({unit, depth_++});
  under_way_[static_cast<std::size_t>(unit)].push_back(
      {left_.size(), calls_++});
  const auto known = expected_.find(entered_.front().unit);
  const auto& expected = known != expected_.end() ? known->second : registered_;
  const auto from = expected.begin() + static_cast<std::ptrdiff_t>(cursor_);
  const auto found = std::ranges::find(from, expected.end(), unit, &Call::unit);
  std::vector<std::int32_t> next;
  if (found == expected.end()) {
    return next;
  }
  cursor_ = static_cast<std::size_t>(found - expected.begin()) + 1;
  for (auto i = cursor_; i < expected.size(); ++i) {
    if (i > cursor_ && expected[i].depth <= expected[i - 1].depth) break;
    next.push_back(expected[i].unit);
  }
  return next;
}

std::vector<std::int32_t> Schedule::entered() const {
  std::vector<std::int32_t> units;
  for (const auto& call : entered_) units.push_back(call.unit);
  return units;
}

void Schedule::leave_forward(std::int32_t unit, bool recorded,
                             std::int64_t call) {
  const auto u = static_cast<std::size_t>(unit);
  Entered entered{left_.size(), calls_++};
  if (!under_way_[u].empty()) {
    entered = under_way_[u].back();
    under_way_[u].pop_back();
    --depth_;
  }
  if (recorded) {
    first_entered_[u] = std::min(first_entered_[u], entered.at);
    open_[u].push_back({call, left_.size()});
    // What is in a call in this one has been told so already.
    for (auto i = left_.size(); i-- > entered.at; i = left_[i].entered.at) {
      left_[i].around = unit;
    }
    if (std::exchange(begins_, false) || forwards_.empty() ||
        !forwards_.back().open) {
      forwards_.emplace_back();
    }
    left_.push_back({unit, entered, kNobody, forwards_.size() - 1});
  }
}

void Schedule::end_forward(bool detached) {
  if (!entered_.empty()) expected_[entered_.front().unit] = entered_;
  // What reads rows behind a detached one is not in it.
  if (detached && !std::exchange(begins_, true)) {
    forwards_.back().detached = true;
    forwards_.back().first = entered_.front().unit;
  }
}

const Schedule::Open* Schedule::find_open(std::int32_t unit,
                                          std::int64_t call) const {
  const auto& open = open_[static_cast<std::size_t>(unit)];
  const auto found =
      std::find_if(open.rbegin(), open.rend(),
                   [call](const Open& one) { return one.call == call; });
  return found == open.rend() ? nullptr : &*found;
}

Schedule::BackwardCall Schedule::enter_backward(
    std::int32_t unit, std::int64_t call, std::optional<std::size_t> within) {
  BackwardCall entered;
  const auto* const found = find_open(unit, call);
  if (found == nullptr) {
    return entered;
  }
  const auto place = found->place;
  auto& open = open_[static_cast<std::size_t>(unit)];
  open.erase(open.begin() + (found - open.data()));
  const auto& left = left_[place];
  entered.place = place;
  entered.last = open.empty();
  entered.alone = left.entered.at == place;
  if (left.around != kNobody) entered.around = left.around;
  entered.earliest = true;
  forwards_[left.forward].entered = true;
  for (auto before = place; before-- > 0;) {
    const auto& call = left_[before];
    if (!is_open(call)) continue;
    if (within && call.forward != *within) break;
    entered.earliest = false;
    entered.next.push_back(call.unit);
    if (call.entered.at == before || call.around == kNobody) break;
  }
  return entered;
}

std::optional<std::size_t> Schedule::detached_of(std::int32_t unit,
                                                 std::int64_t call) const {
  const auto* const open = find_open(unit, call);
  if (open == nullptr) return {};
  const auto forward = left_[open->place].forward;
  return forwards_[forward].detached ? std::optional(forward) : std::nullopt;
}

bool Schedule::is_over(std::int32_t unit, std::size_t place) const {
  const auto first = first_entered_[static_cast<std::size_t>(unit)];
  return first != kNever && first > place;
}

void Schedule::end_backward() {
  for (auto& forward : forwards_) {
    if (std::exchange(forward.entered, false)) forward.open = false;
  }
  if (open_forwards() == 0) {
    forget_forwards();
    return;
  }
  for (auto& calls : open_) {
    std::erase_if(calls, [this](const Open& call) {
      return !is_open(left_[call.place]);
    });
  }
  std::ranges::fill(first_entered_, kNever);
  for (const auto& call : left_) {
    auto& first = first_entered_[static_cast<std::size_t>(call.unit)];
    if (is_open(call)) first = std::min(first, call.entered.at);
  }
}

std::size_t Schedule::open_forwards() const {
  return static_cast<std::size_t>(
      std::ranges::count(forwards_, true, &Forward::open));
}

void Schedule::forget_forwards() {
  forwards_.clear();
  left_.clear();
  for (auto& open : open_) {
    open.clear();
  }
  std::ranges::fill(first_entered_, kNever);
}

std::vector<std::int32_t> Schedule::completion_order(
    std::optional<std::size_t> forward) const {
  std::map<std::int32_t, std::int64_t> first;
  for (const auto& call : left_) {
    if (!is_open(call) || (forward && call.forward != *forward)) continue;
    const auto [known, _] = first.emplace(call.unit, call.entered.order);
    known->second = std::min(known->second, call.entered.order);
  }
  std::vector<std::int32_t> order;
  for (const auto& [unit, entered] : first) order.push_back(unit);
  std::ranges::sort(order, std::ranges::greater(),
                    [&](auto unit) { return first.at(unit); });
  return order;
}

void Schedule::abort() {
  entered_.clear();
  cursor_ = depth_ = 0;
  forget_forwards();
}

}  // namespace lowtide::shard
