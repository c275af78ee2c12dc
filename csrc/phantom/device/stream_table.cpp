#include "phantom/device/stream_table.h"

#include <algorithm>
#include <utility>

namespace lowtide::phantom {
namespace {

thread_local StreamId current = kDefaultStream;

void join(StreamTable::Clock& clock, const StreamTable::Clock& other) {
  for (const auto& [stream, position] : other) {
    auto& mine = clock[stream];
    mine = std::max(mine, position);
  }
}

class StreamEvents final : public EventSource {
 public:
  explicit StreamEvents(StreamTable& table) : table_(table) {}

  EventId record(StreamId stream) override {
    points_.emplace(++last_, table_.record(stream));
    return last_;
  }

  bool done(EventId event) override {
    const auto point = points_.find(event);
    if (point == points_.end()) return true;
    if (!table_.done(point->second)) return false;
    points_.erase(point);
    return true;
  }

  void wait(EventId event) override {
    const auto point = points_.find(event);
    if (point == points_.end()) return;
    table_.synchronize(point->second);
    points_.erase(point);
  }

  void synchronized(std::optional<StreamId> stream) override {
    stream ? table_.synchronize(*stream) : table_.synchronize();
  }

 private:
  StreamTable& table_;
  EventId last_ = 0;
  std::map<EventId, StreamTable::Point> points_;
};

}  // namespace

StreamId StreamTable::next_stream(int priority) {
  const std::lock_guard lock(mutex_);
  const int urgent = priority < 0 ? 1 : 0;
  const int slot = handed_out_[urgent]++ % kStreamsPerPriority;
  return 1 + urgent * kStreamsPerPriority + slot;
}

StreamTable::Point StreamTable::record(StreamId stream) {
  if (progress_ == Progress::immediate) return {stream, {}};
  const std::lock_guard lock(mutex_);
  Clock& clock = clocks_[stream];
  ++clock[stream];
  return {stream, clock};
}

void StreamTable::wait(StreamId stream, const Point& point) {
  if (point.clock.empty()) return;
  const std::lock_guard lock(mutex_);
  join(clocks_[stream], point.clock);
}

bool StreamTable::done(const Point& point) const {
  if (point.clock.empty()) return true;
  const std::lock_guard lock(mutex_);
  const auto known = done_.find(point.stream);
  return known != done_.end() && known->second >= point.clock.at(point.stream);
}

bool StreamTable::done(StreamId stream) const {
  const std::lock_guard lock(mutex_);
  const auto clock = clocks_.find(stream);
  if (clock == clocks_.end()) return true;
  const auto known = done_.find(stream);
  const auto issued = clock->second.find(stream);
  if (issued == clock->second.end()) return true;
  return known != done_.end() && known->second >= issued->second;
}

void StreamTable::complete(const Clock& clock) { join(done_, clock); }

void StreamTable::synchronize(const Point& point) {
  const std::lock_guard lock(mutex_);
  complete(point.clock);
}

void StreamTable::synchronize(StreamId stream) {
  const std::lock_guard lock(mutex_);
  const auto clock = clocks_.find(stream);
  if (clock != clocks_.end()) complete(clock->second);
}

void StreamTable::synchronize() {
  const std::lock_guard lock(mutex_);
  for (const auto& [stream, clock] : clocks_) complete(clock);
}

std::unique_ptr<EventSource> stream_events(StreamTable& table) {
  return std::make_unique<StreamEvents>(table);
}

StreamId current_stream() { return current; }

StreamId exchange_current_stream(StreamId stream) {
  return std::exchange(current, stream);
}

}  // namespace lowtide::phantom
