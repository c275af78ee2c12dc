// Tells the timekeeper of what is asked of NCCL.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "phantom/driver/communicators.h"
#include "phantom/time/collectives.h"

namespace lowtide::dry {

// At most so many channels for a communicator, as its configuration has it; 0
// and less: no limit.
void limit_channels(const Communicator& communicator, int most);

// One call.  `bytes`: of the full buffer on one rank, see
// phantom::collective_seconds; `peer`: rank in the communicator of a send or
// receive, else -1.
//
// Between ncclGroupStart and ncclGroupEnd of the calling thread the calls on a
// communicator become one kernel, on the stream of the first.
void time_collective(const Communicator& communicator,
                     phantom::CollectiveKind kind, std::size_t bytes, int peer,
                     cudaStream_t stream);
void time_group_begins();
void time_group_ends();

}  // namespace lowtide::dry
