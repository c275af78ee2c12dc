#include "phantom/allocator/pending_frees.h"

namespace lowtide::phantom {

void PendingFrees::add(Block* block, EventSource& events) {
  for (const StreamId stream : std::exchange(block->other_streams, {})) {
    queues_[stream].emplace_back(events.record(stream), block);
    ++block->num_events;
  }
}

std::vector<Block*> PendingFrees::take_done(EventSource& events) {
  std::vector<Block*> freed;
  for (auto& [stream, queue] : queues_) {
    while (!queue.empty() && events.done(queue.front().first)) {
      Block* block = queue.front().second;
      queue.pop_front();
      if (--block->num_events == 0) freed.push_back(block);
    }
  }
  std::erase_if(queues_,
                [](const auto& entry) { return entry.second.empty(); });
  return freed;
}

std::vector<Block*> PendingFrees::wait_for_all(EventSource& events) {
  for (auto& [stream, queue] : queues_) {
    for (auto& [event, block] : queue) events.wait(event);
  }
  return take_done(events);
}

}  // namespace lowtide::phantom
