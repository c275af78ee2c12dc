// Tensor.record_stream of tensors whose bytes lowtide has from torch.
#pragma once

namespace lowtide::device {

// From the first call on it keeps those, too, for the stream, as
// [Note: Wrapped bytes] tells why it would not.
void record_streams_of_wrapped_bytes();

}  // namespace lowtide::device
