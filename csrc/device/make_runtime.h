// The runtime of a device.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "device/runtime.h"

namespace lowtide::device {

// A new one, with communication streams of its own where there are streams.
// Throws lowtide::InvalidArgument, saying what is supported, for a device type
// this build does not know.
std::shared_ptr<Runtime> make_runtime(c10::Device device);

}  // namespace lowtide::device
