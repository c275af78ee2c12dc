// Sees every c10 allocation and release made on a thread and on the threads
// autograd and c10d run that thread's work on, for as long as it lives.
//
// This is the hook torch's own memory profiler uses (one per thread), so the
// two exclude each other.  Used by memory::AllocationTimeline and by
// ScriptedRuntime, which checks torch's allocations along with lowtide's.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace lowtide::device {

// `bytes` > 0 for an allocation, < 0 for a release.  Called from any of the
// threads above, one at a time.  Must not allocate through c10.
using AllocationCallback =
    std::function<void(void* begin, std::int64_t bytes, c10::Device device)>;

class AllocationObserver {
 public:
  // Starts on the calling thread.  Throws lowtide::Error, naming `who`, when
  // torch.profiler or another observer is active on this thread.
  AllocationObserver(const char* who, AllocationCallback callback);

  // Stops; after it returns no callback runs.  Destroyed on another thread
  // than the one it started on, it leaves an inert entry behind there.
  ~AllocationObserver();

  AllocationObserver(const AllocationObserver&) = delete;
  AllocationObserver& operator=(const AllocationObserver&) = delete;

  // Whether the calling thread is the one it started on.
  bool started_here() const;

 private:
  class State;
  std::shared_ptr<State> state_;
  std::thread::id thread_;
};

// While alive on a thread, observers do not see that thread's allocations.
// lowtide's own leases are entered in the ledger, which also counts releases on
// threads no observer reaches; without this they would count twice.
class UnobservedAllocations {
 public:
  UnobservedAllocations();
  ~UnobservedAllocations();
  UnobservedAllocations(const UnobservedAllocations&) = delete;
  UnobservedAllocations& operator=(const UnobservedAllocations&) = delete;
};

}  // namespace lowtide::device
