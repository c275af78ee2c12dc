#include "phantom/allocator/events.h"

#include <map>

namespace lowtide::phantom {
namespace {

class ImmediateEvents final : public EventSource {
 public:
  EventId record(StreamId) override { return 0; }
  bool done(EventId) override { return true; }
  void wait(EventId) override {}
  void synchronized(std::optional<StreamId>) override {}
};

class AtSyncEvents final : public EventSource {
 public:
  EventId record(StreamId stream) override {
    streams_.emplace(++last_, stream);
    return last_;
  }

  bool done(EventId event) override { return !streams_.contains(event); }

  // Work on a stream runs in order, so what was recorded before is done too.
  void wait(EventId event) override {
    const auto found = streams_.find(event);
    if (found == streams_.end()) return;
    const StreamId stream = found->second;
    std::erase_if(streams_, [&](const auto& entry) {
      return entry.second == stream && entry.first <= event;
    });
  }

  void synchronized(std::optional<StreamId> stream) override {
    std::erase_if(streams_, [&](const auto& entry) {
      return !stream || entry.second == *stream;
    });
  }

 private:
  EventId last_ = 0;
  std::map<EventId, StreamId> streams_;  // of the events not complete yet
};

}  // namespace

std::unique_ptr<EventSource> immediate_events() {
  return std::make_unique<ImmediateEvents>();
}

std::unique_ptr<EventSource> at_sync_events() {
  return std::make_unique<AtSyncEvents>();
}

}  // namespace lowtide::phantom
