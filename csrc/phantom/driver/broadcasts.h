// Which bytes a broadcast brings.
//
// Between devices of one process (ncclCommInitAll) those of its root.  Between
// ranks that are not there every rank gives what this one does: of broadcasts
// in one group, by which a list is gathered, each brings what this rank gives
// as the root of one of them.
#pragma once

#include <cstddef>

#include "phantom/driver/communicators.h"

namespace lowtide::dry {

// `bytes` from `from`, which is this rank's, to `to`; both on the device.
// Inside of ncclGroupStart the calling thread's broadcasts bring theirs when
// the outermost group ends.
void bring_broadcast(const Communicator& communicator, int root,
                     const void* from, void* to, std::size_t bytes);
void bring_grouped_broadcasts();

}  // namespace lowtide::dry
