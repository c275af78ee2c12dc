// Page-locked memory of the host.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "phantom/driver/address_space.h"

namespace lowtide::dry {

// Ranges that were allocated here, which take the machine's memory where they
// are touched, and ranges that programs registered.  Thread-safe.
class PinnedMemory {
 public:
  // nullptr: the machine has none.
  void* allocate(std::size_t bytes);
  // False for a range that is there already, in part.
  bool add(const void* pointer, std::size_t bytes);
  // Bytes of the range that begins here, gone from now on; 0: there is none.
  std::size_t remove(void* pointer);
  bool has(const void* pointer) const;

  // Writes zeros to any memory of the host.  Whole pages of what was allocated
  // here are given back to the machine for it: what comes from a device in bulk
  // has no bytes, and takes none until the program writes there.
  void clear(void* to, std::size_t bytes);

 private:
  struct Range {
    std::size_t bytes = 0;
    bool own = false;
  };
  using Ranges = std::map<Address, Range>;

  // Past-the-end where no range has it.
  Ranges::const_iterator around(Address address) const;

  mutable std::mutex mutex_;
  Ranges ranges_;  // never overlap
};

PinnedMemory& pinned_memory();

}  // namespace lowtide::dry
