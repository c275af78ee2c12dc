// Which bytes an all-to-all in pairs brings: of a group of sends and receives
// with every rank, this one included, as torch makes of it.
//
// Every rank gives what this one does: what comes from a rank is what this one
// sends there, as of ncclAlltoAll.  Other sends and receives, as of a pipeline,
// bring nothing.
#pragma once

#include <cstddef>

#include "phantom/driver/communicators.h"

namespace lowtide::dry {

// `from` and `to` are on the device.  They are exchanged when the calling
// thread's outermost group ends.
void send_in_group(const Communicator& communicator, int peer, const void* from,
                   std::size_t bytes);
void receive_in_group(const Communicator& communicator, int peer, void* to,
                      std::size_t bytes);
void bring_exchanges();

}  // namespace lowtide::dry
