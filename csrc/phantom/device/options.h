// What a phantom device simulates, chosen once per process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "phantom/allocator/settings.h"

namespace lowtide::phantom {

enum class Mode : std::uint8_t {
  // Tensors have bytes; every operator runs its CPU kernel on them.
  exact,
  // Shapes and allocations only: no bytes, no compute.
  meta,
};

// When work on a stream counts as done, seen from the host.
enum class Progress : std::uint8_t {
  immediate,  // as soon as it is issued: the lower bound of what is reserved
  at_sync,    // once the host waited for it: the upper bound
};

struct Options {
  Mode mode = Mode::meta;
  AllocatorSettings allocator;
  Progress progress = Progress::immediate;
  // Bytes of each cuBLAS workspace, one per handle (thread) and stream.
  std::size_t cublas_workspace = 0;
  // The same for cuBLASLt, which multiplies where a bias is added.
  std::size_t cublaslt_workspace = 0;
  // Operators, by name without overload ("aten::foo"), whose memory was not
  // reviewed and that may run in meta mode all the same.
  std::vector<std::string> allowed_operators;
};

}  // namespace lowtide::phantom
