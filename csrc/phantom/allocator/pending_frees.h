// Blocks that were freed while other streams may still use them.
#pragma once

#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "phantom/allocator/block.h"
#include "phantom/allocator/events.h"

namespace lowtide::phantom {

class PendingFrees {
 public:
  // Records an event on each of the block's other streams.
  void add(Block* block, EventSource& events);

  // The blocks whose last event is complete; they are not pending any more.
  std::vector<Block*> take_done(EventSource& events);
  // Waits for every event, so these are all that were pending.
  std::vector<Block*> wait_for_all(EventSource& events);

 private:
  // In the order of recording, so that only the first has to be asked.
  std::map<StreamId, std::deque<std::pair<EventId, Block*>>> queues_;
};

}  // namespace lowtide::phantom
