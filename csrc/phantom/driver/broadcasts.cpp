#include "phantom/driver/broadcasts.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "phantom/driver/collective_log.h"
#include "phantom/driver/device.h"

namespace lowtide::dry {
namespace {

void copy(void* to, const void* from, std::size_t bytes) {
  if (to != from) copy_bytes(to, from, bytes);
}

// What the roots of broadcasts between devices of this process gave last; a
// root is called before the others, as torch does it.
class LocalBroadcasts {
 public:
  // What lies at the root, for a rank that is called with `from`.
  const void* source(const Communicator& communicator, int root,
                     const void* from) {
    const std::lock_guard lock(mutex_);
    auto& at_root = at_root_[communicator.clique];
    if (communicator.rank == root) at_root = from;
    return at_root;
  }

 private:
  std::mutex mutex_;
  std::map<std::int64_t, const void*> at_root_;  // by clique
};

struct Broadcast {
  std::int64_t communicator = 0;  // its number
  bool is_root = false;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t bytes = 0;
};

// The calling thread's, of the group that it is in.
thread_local std::vector<Broadcast> grouped;

}  // namespace

void bring_broadcast(const Communicator& communicator, int root,
                     const void* from, void* to, std::size_t bytes) {
  if (communicator.clique != 0) {
    static LocalBroadcasts local;
    const auto* source = local.source(communicator, root, from);
    if (source != nullptr) copy(to, source, bytes);
    return;
  }
  grouped.push_back(
      {communicator.number, communicator.rank == root, from, to, bytes});
  if (CollectiveLog::depth() == 0) bring_grouped_broadcasts();
}

void bring_grouped_broadcasts() {
  const auto all = std::exchange(grouped, {});
  for (const auto& each : all) {
    const auto given = [&](const Broadcast& other) {
      return other.is_root && other.communicator == each.communicator &&
             other.bytes == each.bytes;
    };
    const auto found = std::find_if(all.begin(), all.end(), given);
    const bool is_given = !each.is_root && found != all.end();
    copy(each.to, is_given ? found->from : each.from, each.bytes);
  }
}

}  // namespace lowtide::dry
