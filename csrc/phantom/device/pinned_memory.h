// Page-locked host memory of the simulated device: ordinary host memory that
// is known to be pinned.
#pragma once

#include <c10/core/Allocator.h>

namespace lowtide::phantom {

// The same object for every call; owned by the library.  Thread-safe.
c10::Allocator& pinned_memory();
bool is_pinned(const void* data);

}  // namespace lowtide::phantom
