// Makes the simulated device torch's PrivateUse1 backend.
#pragma once

#include "phantom/device/options.h"

namespace lowtide::phantom {

// Once per process, before its first backward: torch's autograd engine starts
// its threads then, one for each device it knows.  Registers allocator, guard,
// hooks and kernels.  Throws lowtide::Error when it comes too late or twice,
// lowtide::InvalidArgument for settings torch refuses.
void install(Options options);

}  // namespace lowtide::phantom
