// How far the operators that a CUDA graph captures have moved a generator.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

namespace lowtide::device {

// Nothing while no torch.cuda.graph captures the current stream of the
// generator's device.  The caller holds the generator's mutex.
std::optional<std::uint64_t> captured_offset(const at::Generator& generator);

}  // namespace lowtide::device
