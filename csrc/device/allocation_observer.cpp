#include "device/allocation_observer.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

#include "base/check.h"

namespace lowtide::device {
namespace {

namespace profiler = torch::profiler::impl;

// A constant of its library, and no constant expression, from 2.13 on.
const auto& kKind = c10::DebugInfoKind::PROFILER_STATE;

thread_local int unobserved_depth = 0;

}  // namespace

// torch casts whatever is registered under PROFILER_STATE to ProfilerStateBase
// and asks it for its configuration, hence that base class and not just
// c10::MemoryReportingInfoBase.
class AllocationObserver::State final : public profiler::ProfilerStateBase {
 public:
  explicit State(AllocationCallback callback)
      : ProfilerStateBase(
            profiler::ProfilerConfig(profiler::ProfilerState::Disabled)),
        callback_(std::move(callback)) {}

  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::NONE;
  }

  bool memoryProfilingEnabled() const override { return active_; }

  void reportMemoryUsage(void* begin, std::int64_t bytes,
                         std::size_t /*total_allocated*/,
                         std::size_t /*total_reserved*/,
                         c10::Device device) override {
    if (unobserved_depth > 0) return;
    const std::lock_guard lock(mutex_);
    if (callback_) callback_(begin, bytes, device);
  }

  void stop() {
    active_ = false;
    const std::lock_guard lock(mutex_);
    callback_ = nullptr;
  }

 private:
  std::atomic<bool> active_ = true;
  std::mutex mutex_;
  AllocationCallback callback_;
};

AllocationObserver::AllocationObserver(const char* who,
                                       AllocationCallback callback)
    : state_(std::make_shared<State>(std::move(callback))),
      thread_(std::this_thread::get_id()) {
  if (auto* other = c10::ThreadLocalDebugInfo::get(kKind)) {
    const auto* ours = dynamic_cast<State*>(other);
    if (ours == nullptr || ours->memoryProfilingEnabled()) {
      throw Error(
          base::error_text(who, "no other memory profiler on this thread",
                           ours == nullptr ? "an active torch profiler"
                                           : "another observer of allocations",
                           "Stop that one first."));
    }
  }
  c10::ThreadLocalDebugInfo::_push(kKind, state_);
}

AllocationObserver::~AllocationObserver() {
  state_->stop();
  if (!started_here() ||
      c10::ThreadLocalDebugInfo::get(kKind) != state_.get()) {
    return;
  }
  try {
    c10::ThreadLocalDebugInfo::_pop(kKind);
  } catch (const std::exception&) {
    // Information of another kind was pushed later and is still in use: the
    // stopped state stays below it.
  }
}

bool AllocationObserver::started_here() const {
  return std::this_thread::get_id() == thread_;
}

UnobservedAllocations::UnobservedAllocations() { ++unobserved_depth; }
UnobservedAllocations::~UnobservedAllocations() { --unobserved_depth; }

}  // namespace lowtide::device
