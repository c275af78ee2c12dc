// How far the operators that a CUDA graph captures have moved a generator.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

namespace lowtide::device {

// In random numbers per thread, since the capture began; nothing while the
// current stream of the generator's device is not captured.  The caller holds
// the generator's mutex.  Throws c10::Error if the capture is not
// torch.cuda.graph's.
std::optional<std::uint64_t> captured_offset(const at::Generator& generator);

}  // namespace lowtide::device
