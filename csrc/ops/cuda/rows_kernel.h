// The kernel that adds rows.  On the current stream of the current device.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace lowtide::ops::cuda {

// Sizes and strides in elements.
struct RowAddition {
  float* to;
  const void* from;
  const std::int64_t* index;
  std::int64_t num_to;  // rows
  std::int64_t num_from;
  std::int64_t width;
  std::int64_t to_stride;
  std::int64_t from_stride;
  std::int64_t index_stride;
};

void launch_add_rows(c10::ScalarType from, const RowAddition& rows);

}  // namespace lowtide::ops::cuda
