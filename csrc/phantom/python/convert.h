// What the allocator reports, as torch.cuda shows it.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "phantom/allocator/snapshot.h"
#include "phantom/allocator/statistics.h"

namespace lowtide::phantom::python {

// torch.cuda.memory_stats_as_nested_dict().
pybind11::dict to_dict(const Statistics& statistics);

// torch.cuda.memory_snapshot(), without call stacks.
pybind11::list to_list(const std::vector<SegmentInfo>& segments);

// (action, address, bytes, stream) per entry.
pybind11::list to_list(const std::vector<TraceEntry>& entries);

}  // namespace lowtide::phantom::python
