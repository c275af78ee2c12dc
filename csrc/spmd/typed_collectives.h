// The transitions of spmd/transition.h as differentiable functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "comm/collectives.h"
#include "spmd/transition.h"

namespace lowtide::spmd {

// Dimensions that are cut and joined; negative ones count from the end.
struct Dims {
  std::int64_t split = 0;  // reduce_scatter, all_to_all, slices
  std::int64_t join = 0;   // all_gather, all_to_all, zeros beside a slice
};

// `x` as `step.dst` where it was `step.src`, along the axis whose ranks `axis`
// connects; its gradient takes the way back that the table says, also in
// double backward.  Waits for the collective before it returns.
//
// Shapes: all_gather multiplies dimension `join` by the axis's size, so does
// convert V -> P; reduce_scatter and convert to V divide `split`.  Throws
// lowtide::InvalidArgument for a pair of types that is not in the table, a
// dimension `x` does not have, or one the axis's size does not divide.
at::Tensor apply(const at::Tensor& x, const Step& step,
                 std::shared_ptr<comm::Collectives> axis, Dims dims);

// What lowtide's own calls are labelled with in comm/call_observer.h.
inline constexpr std::string_view kTypedLabel = "lowtide.spmd.";

}  // namespace lowtide::spmd
