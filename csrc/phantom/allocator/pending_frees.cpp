#include "phantom/allocator/pending_frees.h"

namespace lowtide::phantom {

void PendingFrees::add(Block* block, EventSource& events) {
  for (const StreamId stream : std::exchange(block->other_streams, {})) {
    queues_[stream].emplace_back(events.record(stream), block);
    ++block->num_events;
  }
}

void PendingFrees::finish_done(EventSource& events, const MakeFree& make_free) {
  for (auto& [stream, queue] : queues_) {
    while (!queue.empty() && events.done(queue.front().first)) {
      Block* block = queue.front().second;
      queue.pop_front();
      if (--block->num_events == 0) make_free(block);
    }
  }
  std::erase_if(queues_,
                [](const auto& entry) { return entry.second.empty(); });
}

void PendingFrees::finish_all(EventSource& events, const MakeFree& make_free) {
  for (auto& [stream, queue] : queues_) {
    for (auto& [event, block] : queue) events.wait(event);
  }
  finish_done(events, make_free);
}

}  // namespace lowtide::phantom
