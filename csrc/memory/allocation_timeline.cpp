#include "memory/allocation_timeline.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/check.h"

namespace lowtide::memory {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::size_t kMinCapacity = 4;

std::int64_t sum_of(const Bytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

}  // namespace

// Shared with the two observers, which other threads may be inside of.
class AllocationTimeline::Recording {
 public:
  Recording(std::size_t capacity, const Bytes& lowtide)
      : capacity_(capacity), start_(SteadyClock::now()) {
    now_.lowtide = lowtide;
    now_.total = sum_of(lowtide);
    peak_ = now_;
    samples_.push_back(now_);
  }

  void allocated(void* begin, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    // A release on a thread nobody observes is noticed when the address comes
    // back.
    auto& entry = others_[begin];
    other_ += bytes - entry;
    entry = bytes;
    sample();
  }

  void released(void* begin) {
    const std::lock_guard lock(mutex_);
    const auto entry = others_.find(begin);
    if (entry == others_.end()) return;  // older than the recording
    other_ -= entry->second;
    others_.erase(entry);
    sample();
  }

  void leased(const Bytes& lowtide) {
    const std::lock_guard lock(mutex_);
    now_.lowtide = lowtide;
    sample();
  }

  std::vector<Sample> samples() const {
    const std::lock_guard lock(mutex_);
    std::vector<Sample> samples = samples_;
    if (samples.back().event != now_.event) samples.push_back(now_);
    return samples;
  }

  Sample peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
  }

 private:
  void sample() {
    ++now_.event;
    now_.nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(
                           SteadyClock::now() - start_)
                           .count();
    now_.total = other_ + sum_of(now_.lowtide);
    if (now_.total > peak_.total) peak_ = now_;
    if (events_in_last_ == 0) {
      // One place is left for the last event, see samples().
      if (samples_.size() + 2 > capacity_) halve();
      samples_.push_back(now_);
    } else if (now_.total > samples_.back().total) {
      samples_.back() = now_;
    }
    events_in_last_ = (events_in_last_ + 1) % events_per_sample_;
  }

  void halve() {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < samples_.size(); i += 2) {
      const bool second =
          i + 1 < samples_.size() && samples_[i + 1].total > samples_[i].total;
      samples_[kept++] = samples_[second ? i + 1 : i];
    }
    samples_.resize(kept);
    events_per_sample_ *= 2;
  }

  mutable std::mutex mutex_;
  const std::size_t capacity_;
  const SteadyClock::time_point start_;
  std::unordered_map<void*, std::int64_t> others_;
  std::int64_t other_ = 0;
  Sample now_;
  Sample peak_;
  std::vector<Sample> samples_;
  std::int64_t events_per_sample_ = 1;
  std::int64_t events_in_last_ = 0;
};

std::int64_t AllocationTimeline::Sample::other() const {
  return total - sum_of(lowtide);
}

AllocationTimeline::AllocationTimeline(c10::DeviceType device_type,
                                       std::shared_ptr<Ledger> ledger,
                                       std::size_t capacity)
    : device_type_(device_type),
      ledger_(std::move(ledger)),
      capacity_(capacity) {
  if (capacity < kMinCapacity) {
    throw InvalidArgument(base::error_text(
        "allocation timeline",
        base::concat("a capacity of at least ", kMinCapacity, " samples"),
        std::to_string(capacity), "Leave it out for the default."));
  }
}

AllocationTimeline::~AllocationTimeline() {
  if (observer_ && ledger_) ledger_->observe(nullptr);
}

void AllocationTimeline::start() {
  if (observer_) {
    throw Error(base::error_text("allocation timeline", "start() once",
                                 "start() while it runs",
                                 "Call stop() first."));
  }
  auto recording = std::make_shared<Recording>(
      capacity_, ledger_ ? ledger_->live() : Bytes{});
  auto observer = std::make_unique<device::AllocationObserver>(
      "allocation timeline",
      [recording, type = device_type_](void* begin, std::int64_t bytes,
                                       c10::Device device) {
        if (device.type() != type) return;
        if (bytes > 0) {
          recording->allocated(begin, bytes);
        } else {
          recording->released(begin);
        }
      });
  if (ledger_) {
    ledger_->observe(
        [recording](const Bytes& live) { recording->leased(live); });
  }
  recording_ = std::move(recording);
  observer_ = std::move(observer);
}

void AllocationTimeline::stop() {
  if (!observer_) return;
  if (!observer_->started_here()) {
    throw Error(base::error_text(
        "allocation timeline", "stop() on the thread that called start()",
        "another thread", "Stop it where it was started."));
  }
  if (ledger_) ledger_->observe(nullptr);
  observer_.reset();
}

std::vector<AllocationTimeline::Sample> AllocationTimeline::samples() const {
  return recording_ ? recording_->samples() : std::vector<Sample>{};
}

AllocationTimeline::Sample AllocationTimeline::peak() const {
  return recording_ ? recording_->peak() : Sample{};
}

}  // namespace lowtide::memory
