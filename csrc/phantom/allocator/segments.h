// Where segments lie: the driver's part of the allocator.  Addresses are
// handed out lowest first and do not depend on the process, so a replay gives
// the same ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace lowtide::phantom {

using Address = std::uintptr_t;

// Not thread-safe by itself: the allocator calls it under its own lock.  Never
// fails for want of device memory: the capacity is the allocator's.
class SegmentProvider {
 public:
  virtual ~SegmentProvider() = default;

  virtual Address allocate(std::size_t bytes) = 0;  // cudaMalloc
  virtual void release(Address address, std::size_t bytes) = 0;
  // cuMemAddressReserve: a range that is mapped and unmapped piece by piece.
  virtual Address reserve(std::size_t bytes) = 0;
  virtual void unreserve(Address address, std::size_t bytes) = 0;
  virtual void map(Address address, std::size_t bytes) = 0;  // cuMemMap
  virtual void unmap(Address address, std::size_t bytes) = 0;
};

// Plain numbers: nothing in this process lies there.
std::unique_ptr<SegmentProvider> numbered_segments();

// Addresses of this process that no other mapping has and that fault when
// touched (no bytes, for tensors without data).  Throws lowtide::Error if the
// process may not reserve `span` bytes of addresses.
std::unique_ptr<SegmentProvider> faulting_segments(
    std::size_t span = std::size_t{64} << 40);

// The same, with real host bytes behind every segment; they are zero when a
// segment is allocated and cost memory only when touched.
std::unique_ptr<SegmentProvider> host_segments(
    std::size_t span = std::size_t{64} << 40);

}  // namespace lowtide::phantom
