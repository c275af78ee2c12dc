// NCCL's ways of sending, by its tuning model (src/graph/tuning.cc).
#pragma once

#include <cstdint>
#include <vector>

#include "phantom/time/collectives.h"
#include "phantom/time/machine.h"

namespace lowtide::phantom {

// One protocol on a ring or a tree, all channels used.  Seconds, bytes.
struct Way {
  const Protocol* protocol = nullptr;
  double base = 0;          // before anything is sent
  double hops = 0;          // around the ring, or up and down the tree
  double sending = 0;       // the bytes, at the bandwidth of the links
  double link_seconds = 0;  // of it, for which they are full
  double carried = 0;       // bytes that pass through one rank's channels

  double seconds() const { return base + hops + sending; }
};

// At least two ranks.
std::vector<Way> ways_of(CollectiveKind kind, double bytes,
                         const Placement& placement, const Network& network);

// Of a link, what the protocol leaves for the program's bytes.
double payload_bandwidth(double link, const Placement& placement,
                         const Protocol& protocol);

}  // namespace lowtide::phantom
