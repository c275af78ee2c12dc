// What a process asked of NCCL, in order.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace lowtide::dry {

struct Communicator {
  int rank = 0;
  int size = 0;
};

// A line for each call: what, bytes that a rank gives, reduction, priority of
// its stream, communicator, and the depth of groups it is in.  New
// communicators: "init" or "split", and the most CTAs they may have.
// Thread-safe.
class CollectiveLog {
 public:
  ncclComm_t add(Communicator communicator);
  Communicator of(ncclComm_t communicator) const;
  void enter_group(int more);
  void note(const std::string& what, ncclComm_t communicator);

  // Valid until the next call.
  const char* lines();

 private:
  mutable std::mutex mutex_;
  std::uintptr_t last_ = 0;
  int depth_ = 0;
  std::map<std::uintptr_t, Communicator> communicators_;
  std::string lines_;
  std::string shown_;
};

CollectiveLog& collective_log();

}  // namespace lowtide::dry
