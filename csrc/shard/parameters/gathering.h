// How every gather of a unit is issued.
#pragma once

#include <memory>

#include "comm/collectives.h"
#include "device/runtime.h"

namespace lowtide::shard {

// Calls `issue`, which starts a collective, with `gather` as the current
// stream, behind everything that compute has enqueued: the leases of what it
// writes to.  If that throws, what had begun already reads and writes those
// bytes: `give_back` runs after compute was made to wait for it.
template <typename Issue, typename GiveBack>
std::unique_ptr<comm::Pending> issue_gather(device::Runtime& runtime,
                                            Issue issue, GiveBack give_back) {
  using device::Stream;
  runtime.wait(Stream::gather, runtime.record(Stream::compute));
  const device::StreamScope scope(runtime, Stream::gather);
  try {
    return issue();
  } catch (...) {
    runtime.wait(Stream::compute, runtime.record(Stream::gather));
    give_back();
    throw;
  }
}

}  // namespace lowtide::shard
