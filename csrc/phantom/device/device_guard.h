// How torch switches devices and streams and uses events: streams and events
// of the StreamTable behind c10's DeviceGuardImplInterface.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace lowtide::phantom {

// The same object for every call; owned by the library.
const c10::impl::DeviceGuardImplInterface& device_guard();

}  // namespace lowtide::phantom
