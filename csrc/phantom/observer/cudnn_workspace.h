// What cuDNN asks for beside arguments and results.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <optional>

namespace lowtide::dry {

// Bytes of the workspace of cuDNN's own in an operator of its attention, none
// for others: 256, and in the backward of fewer heads of keys than of queries
// the gradients of keys and values of every query head. cuDNN does not say;
// read off an H200 (docs/gpu_check.md). The frontend in torch adds its part.
std::optional<std::int64_t> cudnn_workspace(const at::RecordFunction& function);

}  // namespace lowtide::dry
