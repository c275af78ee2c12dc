// Copies of torch's between the host and a device.
#pragma once

namespace lowtide::device {

// From the first call on, who leases host bytes is told of torch's copies that
// use them: see [Note: Host bytes in torch's copies].  Thread-safe; further
// calls do nothing.
void note_copies_of_host_bytes();

}  // namespace lowtide::device
