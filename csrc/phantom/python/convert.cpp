#include "phantom/python/convert.h"

#include <string>
#include <string_view>

namespace py = pybind11;

namespace lowtide::phantom::python {
namespace {

py::str text(std::string_view value) { return {value.data(), value.size()}; }

py::dict to_dict(const Stat& stat) {
  py::dict result;
  result["current"] = stat.current;
  result["peak"] = stat.peak;
  result["allocated"] = stat.allocated;
  result["freed"] = stat.freed;
  return result;
}

py::dict to_dict(const PoolStats& stats) {
  py::dict result;
  result["all"] = to_dict(stats[kAll]);
  result["small_pool"] = to_dict(stats[kSmallPool]);
  result["large_pool"] = to_dict(stats[kLargePool]);
  return result;
}

py::dict to_dict(const BlockInfo& block) {
  py::dict result;
  result["address"] = block.address;
  result["size"] = block.size;
  result["requested_size"] = block.requested_size;
  result["state"] = text(name_of(block.state));
  result["frames"] = py::list();
  return result;
}

py::dict to_dict(const SegmentInfo& segment) {
  py::list blocks;
  for (const BlockInfo& block : segment.blocks) blocks.append(to_dict(block));
  py::dict result;
  result["device"] = 0;
  result["address"] = segment.address;
  result["total_size"] = segment.total_size;
  result["allocated_size"] = segment.allocated_size;
  result["active_size"] = segment.active_size;
  result["requested_size"] = segment.requested_size;
  result["stream"] = segment.stream;
  result["segment_type"] = segment.is_large ? "large" : "small";
  result["segment_pool_id"] = py::make_tuple(0, 0);
  result["is_expandable"] = segment.is_expandable;
  result["frames"] = py::list();
  result["blocks"] = blocks;
  return result;
}

}  // namespace

py::dict to_dict(const Statistics& s) {
  py::dict result;
  result["allocation"] = to_dict(s.allocation);
  result["segment"] = to_dict(s.segment);
  result["active"] = to_dict(s.active);
  result["inactive_split"] = to_dict(s.inactive_split);
  result["allocated_bytes"] = to_dict(s.allocated_bytes);
  result["reserved_bytes"] = to_dict(s.reserved_bytes);
  result["active_bytes"] = to_dict(s.active_bytes);
  result["inactive_split_bytes"] = to_dict(s.inactive_split_bytes);
  result["requested_bytes"] = to_dict(s.requested_bytes);
  result["oversize_allocations"] = to_dict(s.oversize_allocations);
  result["oversize_segments"] = to_dict(s.oversize_segments);
  result["num_alloc_retries"] = s.num_alloc_retries;
  result["num_ooms"] = s.num_ooms;
  result["num_sync_all_streams"] = s.num_sync_all_streams;
  result["num_device_alloc"] = s.num_device_alloc;
  result["num_device_free"] = s.num_device_free;
  result["max_split_size"] = s.max_split_size;
  return result;
}

py::list to_list(const std::vector<SegmentInfo>& segments) {
  py::list result;
  for (const SegmentInfo& segment : segments) result.append(to_dict(segment));
  return result;
}

py::list to_list(const std::vector<TraceEntry>& entries) {
  py::list result;
  for (const TraceEntry& entry : entries) {
    result.append(py::make_tuple(text(name_of(entry.action)), entry.address,
                                 entry.size, entry.stream));
  }
  return result;
}

}  // namespace lowtide::phantom::python
