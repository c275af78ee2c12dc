#include "comm/first_failure.h"

#include <exception>
#include <mutex>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "base/check.h"

namespace lowtide::comm {
namespace {

struct Place {
  std::shared_ptr<BorrowedGroup> group;
  std::string key;
};

std::mutex place_mutex;

// Outlives threads that ask while the process ends.
Place& place() {
  static auto* const place = new Place();
  return *place;
}

Place place_now() {
  const std::scoped_lock lock(place_mutex);
  return place();
}

bool is_of_torch(c10::intrusive_ptr<c10d::Store> store) {
  while (const auto prefix =
             c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store)) {
    store = prefix->getUnderlyingStore();
  }
  const auto* const bare = store.get();
  return dynamic_cast<const c10d::TCPStore*>(bare) != nullptr ||
         dynamic_cast<const c10d::FileStore*>(bare) != nullptr ||
         dynamic_cast<const c10d::HashStore*>(bare) != nullptr;
}

std::string said_in(c10d::Store& store, const Place& where) {
  if (!store.check({where.key})) return {};
  const auto value = store.get_to_str(where.key);
  const auto space = value.find(' ');
  const auto rank = value.substr(0, space);
  if (space == value.npos || rank == std::to_string(where.group->rank())) {
    return {};
  }
  return base::concat("rank ", rank, " raised first: '",
                      value.substr(space + 1), "'");
}

}  // namespace

void find_first_failure_in(std::shared_ptr<BorrowedGroup> default_group,
                           std::string key) {
  const std::scoped_lock lock(place_mutex);
  place() = {std::move(default_group), std::move(key)};
}

std::string first_failure() {
  const auto where = place_now();
  if (!where.group) return {};
  try {
    return said_in(*where.group->get()->getStore(), where);
  } catch (const std::exception&) {
    return {};
  }
}

std::string first_failure_aside() {
  const auto where = place_now();
  if (!where.group) return {};
  try {
    const auto store = where.group->get()->getStore();
    return is_of_torch(store) ? said_in(*store->clone(), where) : "";
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace lowtide::comm
