#include "phantom/driver/communicators.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>

namespace lowtide::dry {
namespace {

using Lock = std::lock_guard<std::mutex>;

std::string text_of(const ncclUniqueId& id) {
  return {id.internal, sizeof id.internal};
}

Group unnamed(int size) {
  Group group;
  group.ranks.resize(static_cast<std::size_t>(size));
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  return group;
}

std::optional<Group>& next_split() {
  thread_local std::optional<Group> next;
  return next;
}

}  // namespace

void Communicators::name(const ncclUniqueId& id, Group group) {
  const Lock lock(mutex_);
  groups_[text_of(id)] = std::move(group);
}

void Communicators::name_split(Group group) { next_split() = std::move(group); }

Communicator Communicators::add(const ncclUniqueId& id, int rank, int size) {
  const Lock lock(mutex_);
  const auto found = groups_.find(text_of(id));
  const bool named =
      found != groups_.end() &&
      found->second.ranks.size() == static_cast<std::size_t>(size);
  return keep({0, rank, size, named ? found->second : unnamed(size)});
}

std::int64_t Communicators::new_clique() {
  const Lock lock(mutex_);
  return ++last_clique_;
}

Communicator Communicators::add_local(std::int64_t clique, int rank, int size) {
  const Lock lock(mutex_);
  return keep({0, rank, size, unnamed(size), clique});
}

Communicator Communicators::split(const Communicator& whole) {
  auto group = std::exchange(next_split(), std::nullopt);
  const Lock lock(mutex_);
  if (!group) return keep(whole);
  const auto& ranks = group->ranks;
  const auto world = whole.group.ranks.at(static_cast<std::size_t>(whole.rank));
  const auto found = std::find(ranks.begin(), ranks.end(), world);
  return keep({0, static_cast<int>(found - ranks.begin()),
               static_cast<int>(ranks.size()), *group});
}

Communicator Communicators::of(ncclComm_t handle) const {
  const Lock lock(mutex_);
  return communicators_.at(reinterpret_cast<std::uintptr_t>(handle) - 1);
}

ncclComm_t Communicators::handle_of(const Communicator& communicator) {
  return reinterpret_cast<ncclComm_t>(communicator.number);
}

std::string Communicators::lines() const {
  const Lock lock(mutex_);
  std::ostringstream out;
  for (const auto& communicator : communicators_) {
    out << communicator.number << '\t' << communicator.rank << '\t'
        << communicator.size << '\t';
    const char* between = "";
    for (const auto rank : communicator.group.ranks) {
      out << between << rank;
      between = ",";
    }
    out << '\t' << communicator.group.name << '\n';
  }
  return out.str();
}

Communicator Communicators::keep(Communicator communicator) {
  communicator.number = static_cast<std::int64_t>(communicators_.size()) + 1;
  communicators_.push_back(communicator);
  return communicator;
}

Communicators& communicators() {
  static Communicators communicators;
  return communicators;
}

ncclUniqueId new_unique_id() {
  static std::atomic<std::int64_t> last = 0;
  const std::int64_t numbers[] = {getpid(), ++last};
  ncclUniqueId id{};
  std::memcpy(id.internal, numbers, sizeof numbers);
  return id;
}

}  // namespace lowtide::dry
