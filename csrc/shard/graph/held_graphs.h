// Graphs of earlier backwards that may send a unit gradients once more: those
// that a backward kept (retain_graph) and those that it recorded
// (create_graph).
//
// [Note: Who holds a graph]
// How long a graph lives is each rank's own affair: one rank logs a loss with
// its graph, Python's collector runs later on another.  Yet the order of calls
// depends on whether there is one.  So ranks compare what they hold, and a
// graph is there on all of them until none has one any more.
#pragma once

#include <cstdint>
#include <vector>

#include "shard/graph/autograd_nodes.h"

namespace lowtide::shard {

class HeldGraphs {
 public:
  // Of one kind each: 1 if there is a graph.
  struct Kinds {
    std::int64_t kept = 0;
    std::int64_t recorded = 0;
  };

  // The backward that ends has kept the graph of `calls`.
  void keep(const std::vector<WeakNodePtr>& calls);
  // What a recorded backward gave.
  void record(WeakNodePtr result);
  // Of graphs that are gone.
  void forget_expired();

  // What this rank holds, for a comparison that begins now.
  Kinds own();
  // The greatest of what the ranks hold, as that comparison says.
  void agree_on(const Kinds& greatest);

  // On any rank.
  bool kept() const { return kept_on_any_; }
  bool recorded() const { return recorded_on_any_; }

  // The step was aborted on all ranks.
  void clear();

 private:
  std::vector<WeakNodePtr> kept_;
  std::vector<WeakNodePtr> recorded_;
  bool kept_on_any_ = false;
  bool recorded_on_any_ = false;
  bool recorded_since_ = false;  // the comparison began
};

}  // namespace lowtide::shard
