// Blocks that were freed while other streams may still use them.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <utility>

#include "phantom/allocator/block.h"
#include "phantom/allocator/events.h"

namespace lowtide::phantom {

class PendingFrees {
 public:
  // Records an event on each of the block's other streams.
  void add(Block* block, EventSource& events);

  // Calls `make_free` on each block as soon as its last event is complete: a
  // block that is free but in no pool must not be seen by a neighbour.
  using MakeFree = std::function<void(Block*)>;
  void finish_done(EventSource& events, const MakeFree& make_free);
  // The same for all that are pending, after waiting for their events.
  void finish_all(EventSource& events, const MakeFree& make_free);

 private:
  // In the order of recording, so that only the first has to be asked.
  std::map<StreamId, std::deque<std::pair<EventId, Block*>>> queues_;
};

}  // namespace lowtide::phantom
