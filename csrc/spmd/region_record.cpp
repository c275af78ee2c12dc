#include "spmd/region_record.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "spmd/live_regions.h"

namespace lowtide::spmd {

RegionRecord::RegionRecord() = default;

RegionRecord::~RegionRecord() { live_regions().remove(*this); }

void RegionRecord::open() {
  LOWTIDE_INVARIANT(!is_open_ && end_ == 0, "a record is of one forward");
  thread_ = at::RecordFunction::currentThreadId();
  begin_ = end_ = at::sequence_number::peek();
  is_open_ = true;
  live_regions().add(*this);
}

std::vector<Finding> RegionRecord::close() {
  const std::lock_guard lock(live_regions().mutex());
  is_open_ = in_operator_ = false;
  end_ = at::sequence_number::peek();
  return take_forward_calls();
}

void RegionRecord::begin_operator(const std::string& name,
                                  const std::string& where) {
  const std::lock_guard lock(live_regions().mutex());
  auto op = std::make_unique<Operator>();
  op->name = name;
  op->where = where;
  op->begin = op->end = at::sequence_number::peek();
  operators_.push_back(std::move(op));
  in_operator_ = true;
}

void RegionRecord::require(comm::Kind kind, const std::string& group) {
  const std::lock_guard lock(live_regions().mutex());
  LOWTIDE_INVARIANT(!operators_.empty(), "an operator requires it");
  operators_.back()->needs.push_back(
      {std::string(comm::kind_name(kind)), group, ""});
}

std::vector<Finding> RegionRecord::end_operator() {
  const std::lock_guard lock(live_regions().mutex());
  in_operator_ = false;
  operators_.back()->end = at::sequence_number::peek();
  std::vector<Call> mine;
  const auto is_mine = [&](const Call& seen) {
    return seen.op == operators_.back().get();
  };
  std::copy_if(forward_calls_.begin(), forward_calls_.end(),
               std::back_inserter(mine), is_mine);
  forward_calls_.erase(
      std::remove_if(forward_calls_.begin(), forward_calls_.end(), is_mine),
      forward_calls_.end());
  std::vector<Finding> findings;
  for (const Call& seen : mine) findings.push_back(unexpected(seen));
  return findings;
}

void RegionRecord::require_anywhere(comm::Kind kind, const std::string& group,
                                    const std::string& value) {
  const std::lock_guard lock(live_regions().mutex());
  needs_anywhere_.push_back({std::string(comm::kind_name(kind)), group, value});
}

std::optional<std::pair<std::string, std::string>> RegionRecord::place(
    std::uint64_t sequence) {
  const std::lock_guard lock(live_regions().mutex());
  if (!contains(thread_, sequence)) return std::nullopt;
  const Operator* op = operator_of(sequence);
  if (op == nullptr) return std::pair(std::string(), std::string());
  return std::pair(op->name, op->where);
}

std::vector<Finding> RegionRecord::settle() {
  const std::lock_guard lock(live_regions().mutex());
  std::vector<Call> calls = std::exchange(backward_calls_, {});
  std::vector<Need> anywhere = std::exchange(needs_anywhere_, {});
  std::vector<Finding> findings;
  // Takes the first call that meets `need`.
  const auto meet = [&](const Need& need, const Operator* op) {
    const auto met =
        std::find_if(calls.begin(), calls.end(), [&](const Call& seen) {
          const bool group =
              seen.call.group.empty() || seen.call.group == need.group;
          return seen.call.kind == need.kind && group &&
                 (op == nullptr || seen.op == op);
        });
    if (met == calls.end()) return false;
    calls.erase(met);
    return true;
  };
  for (const auto& op : operators_) {
    if (!std::exchange(op->executed, false)) continue;
    for (const Need& need : op->needs) {
      if (meet(need, op.get())) continue;
      findings.push_back(
          {true, need.kind, need.group, "", 0, op->name, op->where});
    }
  }
  for (const Need& need : anywhere) {
    if (meet(need, nullptr)) continue;
    findings.push_back({true, need.kind, need.group, "", 0, need.value, ""});
  }
  for (const Call& seen : calls) findings.push_back(unexpected(seen));
  return findings;
}

std::map<std::string, RegionRecord::Sent> RegionRecord::sent() const {
  const std::lock_guard lock(live_regions().mutex());
  return sent_;
}

bool RegionRecord::contains(std::uint64_t thread,
                            std::uint64_t sequence) const {
  return !is_open_ && thread == thread_ && sequence >= begin_ &&
         sequence < end_;
}

RegionRecord::Operator* RegionRecord::operator_of(std::uint64_t sequence) {
  // Operators come in the order of their numbers.
  const auto after = std::upper_bound(
      operators_.begin(), operators_.end(), sequence,
      [](std::uint64_t number, const auto& op) { return number < op->begin; });
  for (auto it = after; it != operators_.begin();) {
    --it;
    if ((*it)->begin <= sequence && sequence < (*it)->end) return it->get();
    if ((*it)->begin < (*it)->end) break;
  }
  return nullptr;
}

Finding RegionRecord::unexpected(const Call& seen) const {
  const comm::ObservedCall& call = seen.call;
  return {false,
          call.kind,
          call.group,
          call.value,
          call.bytes,
          seen.op != nullptr ? seen.op->name : call.node_name,
          seen.op != nullptr ? seen.op->where : ""};
}

std::vector<Finding> RegionRecord::take_forward_calls() {
  std::vector<Finding> findings;
  for (const Call& seen : std::exchange(forward_calls_, {})) {
    findings.push_back(unexpected(seen));
  }
  return findings;
}

}  // namespace lowtide::spmd
