// The runtime of a device.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "device/runtime.h"

namespace lowtide::device {

// One per device and process.  Throws lowtide::InvalidArgument for a device
// type this build does not support.
std::shared_ptr<Runtime> make_runtime(c10::Device device);

}  // namespace lowtide::device
