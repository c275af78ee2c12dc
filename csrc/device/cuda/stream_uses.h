// What torch says to its allocators alone: which streams use which bytes, by
// Tensor.record_stream, and by copies that do not block the host.
#pragma once

namespace lowtide::device {

// From the first call on the bytes that lowtide has from torch are kept for
// such a stream, too ([Note: Wrapped bytes]), and who leases host bytes is told
// ([Note: Host bytes in torch's copies]).  Thread-safe; further calls do
// nothing.
void note_stream_uses();

}  // namespace lowtide::device
