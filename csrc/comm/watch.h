// Says on the standard error which collective a device does not finish, before
// the process group's timeout ends the process without a name.
//
// [Note: Collectives that never finish]
// NCCL's collectives run on the device and no host waits for them, so nothing
// raises where a peer is gone: torch's watchdog ends the process, and what it
// knows is a sequence number.  Its hooks would not do: a completion hook is one
// a group, tells of what has completed, and an abort has none.  So a thread
// looks once a second at what was issued (issued_calls.h) and asks the device
// for calls alone that are older than a step takes; the group's own error is
// read as long as the watchdog still writes its dump, a minute by default.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/issued_calls.h"

namespace lowtide::comm {

// A communicator with calls that are due.
struct Sight {
  const void* communicator = nullptr;
  std::int64_t rank = 0;
  std::int64_t size = 1;
  std::chrono::milliseconds timeout{};  // of its group
  std::string error;                    // the group's; empty: none
  // Nothing: all that was issued on a group with an error has finished.
  std::optional<IssuedCalls::Unfinished> call;
};

// From which age on a call is asked for, and said to be unfinished.
std::chrono::milliseconds patience(std::chrono::milliseconds timeout);
std::chrono::milliseconds almost(std::chrono::milliseconds timeout);

// What is said of them, each call once: when one nears its timeout, its group
// has an error or another rank has raised.
class Complaints {
 public:
  using Time = IssuedCalls::Time;
  // `first_failure` as of comm/first_failure.h; asked every few seconds.
  explicit Complaints(std::function<std::string()> first_failure);
  // Lines without an end, by the time the calls were issued.
  std::vector<std::string> about(std::vector<Sight> sights, Time now);

 private:
  bool hears_of_failure(Time now);

  std::function<std::string()> ask_;
  std::string failure_;
  std::optional<Time> asked_;
  std::set<std::pair<const void*, std::uint64_t>> said_;
};

class Watched {
 public:
  virtual ~Watched() = default;
  // On the watching thread, without the GIL; must not throw.
  virtual std::optional<Sight> look(IssuedCalls::Time now) = 0;
};

// Looks at it once a second for as long as somebody holds it.
void watch(const std::shared_ptr<Watched>& watched);

}  // namespace lowtide::comm
