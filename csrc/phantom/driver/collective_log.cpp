#include "phantom/driver/collective_log.h"

namespace lowtide::dry {
namespace {

using Lock = std::lock_guard<std::mutex>;

std::uintptr_t number_of(ncclComm_t communicator) {
  return reinterpret_cast<std::uintptr_t>(communicator);
}

}  // namespace

ncclComm_t CollectiveLog::add(Communicator communicator) {
  const Lock lock(mutex_);
  communicators_[++last_] = communicator;
  return reinterpret_cast<ncclComm_t>(last_);
}

Communicator CollectiveLog::of(ncclComm_t communicator) const {
  const Lock lock(mutex_);
  return communicators_.at(number_of(communicator));
}

void CollectiveLog::enter_group(int more) {
  const Lock lock(mutex_);
  depth_ += more;
}

void CollectiveLog::note(const std::string& what, ncclComm_t communicator) {
  const Lock lock(mutex_);
  lines_ += what + " comm " + std::to_string(number_of(communicator)) +
            " group " + std::to_string(depth_) + "\n";
}

const char* CollectiveLog::lines() {
  const Lock lock(mutex_);
  shown_ = lines_;
  return shown_.c_str();
}

CollectiveLog& collective_log() {
  static CollectiveLog log;
  return log;
}

}  // namespace lowtide::dry
