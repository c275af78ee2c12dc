// Tensor.record_stream of tensors whose bytes lowtide has from torch.
#pragma once

namespace lowtide::device {

// From the first call on it keeps those for the stream, too, which torch's own
// would not: see [Note: Wrapped bytes].  Thread-safe; further calls do nothing.
void record_streams_of_wrapped_bytes();

}  // namespace lowtide::device
