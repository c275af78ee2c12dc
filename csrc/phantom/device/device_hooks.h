// What torch asks of a PrivateUse1 backend besides kernels and streams:
// generators, pinned memory, resizing of storages.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace lowtide::phantom {

// The same object for every call; owned by the library.
at::PrivateUse1HooksInterface& device_hooks();

}  // namespace lowtide::phantom
