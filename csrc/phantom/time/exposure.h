// How much of a stretch of time the streams were busy, and how much
// communication nothing hid.
#pragma once

#include <vector>

#include "phantom/time/span.h"

namespace lowtide::phantom {

// Seconds within [begin, end).
struct Usage {
  double seconds = 0;        // end - begin
  double compute = 0;        // the compute stream runs kernels or copies
  double other_kernels = 0;  // another stream runs them
  double communication = 0;  // some collective runs
  // [Note: Exposed communication]
  // A collective runs, and the compute stream runs no kernel because it waits
  // for another stream, or runs the collective itself.
  double exposed = 0;
  // The compute stream waits and no collective runs: for copies and casts on
  // other streams.
  double other_waits = 0;
  // The compute stream is idle and waits for nothing: the host is late.
  double idle = 0;
};

Usage usage(const std::vector<Span>& spans, TimedStream compute, double begin,
            double end);

}  // namespace lowtide::phantom
