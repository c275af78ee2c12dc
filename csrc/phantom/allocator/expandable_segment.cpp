#include "phantom/allocator/expandable_segment.h"

#include "base/check.h"
#include "phantom/allocator/rounding.h"

namespace lowtide::phantom {

ExpandableSegment::ExpandableSegment(SegmentProvider& provider,
                                     DeviceBytes& device, std::size_t page_size,
                                     std::size_t span)
    : provider_(provider),
      device_(device),
      page_size_(page_size),
      span_(round_up(span, page_size)),
      address_(provider.reserve(span_)) {}

ExpandableSegment::~ExpandableSegment() {
  provider_.unreserve(address_, span_);
}

PageRange ExpandableSegment::map(Address address, std::size_t bytes) {
  LOWTIDE_INVARIANT((address - address_) % page_size_ == 0,
                    "mapping starts at a page");
  const std::size_t size = round_up(bytes, page_size_);
  if (!device_.take(size)) return {address, 0};
  provider_.map(address, size);
  return {address, size};
}

PageRange ExpandableSegment::unmap(Address address, std::size_t bytes) {
  const std::size_t offset = address - address_;
  const std::size_t begin = round_up(offset, page_size_);
  const std::size_t end = (offset + bytes) / page_size_ * page_size_;
  if (begin >= end) return {address, 0};
  provider_.unmap(address_ + begin, end - begin);
  device_.give(end - begin);
  return {address_ + begin, end - begin};
}

}  // namespace lowtide::phantom
