// A reserved address range into which pages of device memory are mapped where
// blocks need them.
#pragma once

#include <cstddef>

#include "phantom/allocator/device_bytes.h"
#include "phantom/allocator/segments.h"

namespace lowtide::phantom {

struct PageRange {
  Address address = 0;
  std::size_t size = 0;  // bytes, whole pages
};

class ExpandableSegment {
 public:
  // Both references outlive the segment.  `page_size`: bytes mapped at once.
  ExpandableSegment(SegmentProvider& provider, DeviceBytes& device,
                    std::size_t page_size, std::size_t span);
  ~ExpandableSegment();
  ExpandableSegment(const ExpandableSegment&) = delete;
  ExpandableSegment& operator=(const ExpandableSegment&) = delete;

  // Pages from `address`, where one begins, for at least `bytes`; size 0 if
  // the device has not enough memory.
  PageRange map(Address address, std::size_t bytes);
  // Only pages that lie wholly within the range; size 0 if there is none.
  PageRange unmap(Address address, std::size_t bytes);

  Address address() const { return address_; }
  std::size_t span() const { return span_; }

 private:
  SegmentProvider& provider_;
  DeviceBytes& device_;
  std::size_t page_size_;
  std::size_t span_;  // bytes, whole pages
  Address address_;
};

}  // namespace lowtide::phantom
