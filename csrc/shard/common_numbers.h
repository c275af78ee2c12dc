// Numbers of a unit that ranks may differ in and the order of calls depends on:
// what this rank's are, and what all ranks know of each other.
#pragma once

#include <array>
#include <cstdint>

#include "shard/graph/held_graphs.h"

namespace lowtide::shard {

struct OwnNumbers {
  std::int64_t output_rows = 0;   // of the last forward
  bool saved = false;             // a parameter, by autograd, ever
  HeldGraphs::Kinds graphs = {};  // that may be gone through again
  bool listened = false;          // a hook waits for a gradient
  std::uint64_t used_hash = 0;    // of which parameters graphs use
  bool calls_without_inputs = false;
  bool attached = false;       // see [Note: Detached forwards] in schedule.h
  std::int64_t gather_ns = 0;  // 0: not known
  bool left_out = false;       // a parameter, of a gradient, ever

  // The greatest of what ranks compare is what all know.
  using Compared = std::array<std::int64_t, 11>;
  Compared to_compare() const;
};

// Before any comparison: what moves no call.
struct CommonNumbers {
  std::int64_t fewest_rows = 0;
  bool saved_by_any = false;
  HeldGraphs::Kinds graphs_of_any = {};
  bool listened_by_any = false;
  // [Note: Calls of the program inside a backward]
  // A chunk leaves between two nodes of its unit's backward, where the program
  // may have collectives of its own, a batch norm over all ranks.  Where ranks
  // use different parameters it would leave elsewhere among those: such a
  // backward sends nothing before it is over.
  bool used_alike = true;
  bool calls_without_inputs_of_any = false;
  bool attached_on_any = true;
  std::int64_t gather_ns = 0;  // of the slowest rank; 0: one does not know
  bool left_out_by_any = false;

  static CommonNumbers of(const OwnNumbers::Compared& greatest);
};

}  // namespace lowtide::shard
