#include "shard/schedule.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>

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
    end_backward();
  }
  forward_at_ = left_.size();
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
    left_.push_back({unit, entered});
  }
}

void Schedule::end_forward(bool detached) {
  if (!entered_.empty()) expected_[entered_.front().unit] = entered_;
  if (!detached) return;
  ++forwards_;
  for (auto i = forward_at_; i < left_.size(); ++i)
    left_[i].forward = forwards_;
}

const Schedule::Open* Schedule::find_open(std::int32_t unit,
                                          std::int64_t call) const {
  const auto& open = open_[static_cast<std::size_t>(unit)];
  const auto found =
      std::find_if(open.rbegin(), open.rend(),
                   [call](const Open& one) { return one.call == call; });
  return found == open.rend() ? nullptr : &*found;
}

Schedule::BackwardCall Schedule::enter_backward(std::int32_t unit,
                                                std::int64_t call) {
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
  for (auto before = place; before-- > 0;) {
    const auto& call = left_[before];
    if (call.over) continue;
    if (left.forward != kAttached && call.forward != left.forward) break;
    entered.earliest = false;
    entered.next.push_back(call.unit);
    if (call.entered.at == before || call.around == kNobody) break;
  }
  return entered;
}

Schedule::Detached Schedule::detached_of(std::int32_t unit,
                                         std::int64_t call) const {
  const auto* const open = find_open(unit, call);
  return open != nullptr ? left_[open->place].forward : kAttached;
}

void Schedule::end_backward_of(Detached forward) {
  for (auto& call : left_) call.over |= call.forward == forward;
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

std::vector<std::int32_t> Schedule::completion_order(Detached forward) const {
  std::map<std::int32_t, std::int64_t> first;
  for (const auto& call : left_) {
    if (call.over || (forward != kAttached && call.forward != forward))
      continue;
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
  end_backward();
}

}  // namespace lowtide::shard
