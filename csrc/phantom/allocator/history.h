// The last entries of what an allocator did.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "phantom/allocator/snapshot.h"

namespace lowtide::phantom {

class History {
 public:
  explicit History(std::size_t max_entries) : max_entries_(max_entries) {}

  void add(const TraceEntry& entry) {
    if (max_entries_ == 0) return;
    if (entries_.size() == max_entries_) entries_.pop_front();
    entries_.push_back(entry);
  }
  std::vector<TraceEntry> entries() const {
    return {entries_.begin(), entries_.end()};
  }

 private:
  std::size_t max_entries_;
  std::deque<TraceEntry> entries_;
};

}  // namespace lowtide::phantom
