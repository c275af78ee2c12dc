// Who wants to know of every allocation of the simulated device, and which
// operator makes it.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "phantom/allocator/block.h"

namespace lowtide::phantom {

struct Allocation {
  Address address;
  std::size_t bytes;  // what was asked for
  StreamId stream;
  // The innermost operator that runs on this thread and does more than make an
  // empty tensor ("aten::mm"); empty outside of operators.
  std::string_view operator_name;
};

// Called on the thread that allocates, right after the allocation and without
// a lock held; may throw, then the allocation fails with it.
using AllocationListener = std::function<void(const Allocation&)>;

// Replaces the listener there was; an empty function removes it.  Operators
// are known from here on.  Not while operators run on other threads.
void set_allocation_listener(AllocationListener listener);

void tell_listener(Address address, std::size_t bytes);

}  // namespace lowtide::phantom
