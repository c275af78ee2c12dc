#include "phantom/driver/collective_log.h"

#include <sstream>

namespace lowtide::dry {
namespace {

using Lock = std::lock_guard<std::mutex>;

struct OpenGroups {
  int depth = 0;
  std::int64_t outermost = 0;
};
thread_local OpenGroups open_groups;

}  // namespace

void CollectiveLog::enter_group() {
  if (++open_groups.depth == 1) open_groups.outermost = ++last_group_;
}

void CollectiveLog::leave_group() {
  if (open_groups.depth > 0) --open_groups.depth;
}

int CollectiveLog::depth() { return open_groups.depth; }

void CollectiveLog::add(Call call) {
  call.depth = depth();
  call.group = call.depth > 0 ? open_groups.outermost : 0;
  std::int64_t number = 0;
  {
    const Lock lock(mutex_);
    number = static_cast<std::int64_t>(calls_.size());
    calls_.push_back(call);
  }
  if (const auto hears = heard.load()) hears(number);
}

std::int64_t CollectiveLog::size() const {
  const Lock lock(mutex_);
  return static_cast<std::int64_t>(calls_.size());
}

const char* CollectiveLog::lines() {
  const Lock lock(mutex_);
  std::ostringstream out;
  for (const auto& call : calls_) {
    out << call.kind << '\t' << call.bytes << '\t' << call.type << '\t'
        << call.reduction << '\t' << call.peer << '\t' << call.communicator
        << '\t' << call.stream << '\t' << call.priority << '\t'
        << call.most_ctas << '\t' << call.depth << '\t' << call.group << '\n';
  }
  lines_ = out.str();
  return lines_.c_str();
}

CollectiveLog& collective_log() {
  static CollectiveLog log;
  return log;
}

}  // namespace lowtide::dry
