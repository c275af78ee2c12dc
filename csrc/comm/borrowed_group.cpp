#include "comm/borrowed_group.h"

#include <exception>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/check.h"

namespace lowtide::comm {
namespace {

c10::intrusive_ptr<c10d::ProcessGroup> registered(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    return {};
  }
}

struct Borrowed {
  std::mutex mutex;
  std::unordered_set<BorrowedGroup*> groups;
};

// Never destroyed: models may outlive static objects.
Borrowed& borrowed() {
  static auto* const all = new Borrowed;
  return *all;
}

}  // namespace

BorrowedGroup::BorrowedGroup(c10::intrusive_ptr<c10d::ProcessGroup> group,
                             std::string name)
    : group_(std::move(group)),
      name_(std::move(name)),
      rank_(group_->getRank()),
      size_(group_->getSize()) {
  const std::scoped_lock lock(borrowed().mutex);
  borrowed().groups.insert(this);
}

BorrowedGroup::~BorrowedGroup() {
  const std::scoped_lock lock(borrowed().mutex);
  borrowed().groups.erase(this);
}

void BorrowedGroup::give_back_ended() {
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> ended_on_return;
  const std::scoped_lock lock(borrowed().mutex);
  for (BorrowedGroup* each : borrowed().groups) {
    ended_on_return.push_back(each->take_if_ended());
  }
}

c10::intrusive_ptr<c10d::ProcessGroup> BorrowedGroup::get() const {
  const std::scoped_lock lock(mutex_);
  if (!group_) {
    throw Error(base::error_text(
        "process group", "the one that the model was sharded over",
        base::on_rank("none: it was destroyed", rank_, size_),
        "Call destroy_process_group after the last step, or shard a new model "
        "over a new group."));
  }
  return group_;
}

bool BorrowedGroup::is(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
  const std::scoped_lock lock(mutex_);
  return group_ == group;
}

c10::intrusive_ptr<c10d::ProcessGroup> BorrowedGroup::take_if_ended() {
  const std::scoped_lock lock(mutex_);
  if (!group_ || registered(name_) == group_) return {};
  return std::exchange(group_, {});
}

}  // namespace lowtide::comm
