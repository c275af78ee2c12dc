// When, in the backward of one unit, the gather of the next one leaves.  Pure
// functions of numbers that all ranks share: where a gather leaves among the
// reductions must not depend on one rank's data.
//
// At its beginning the gathered bytes would be there while the unit's values
// have been recomputed and its first gradients come: where the peak of a step
// is.  A backward that computes long enough does not need them yet, so the
// gather leaves as late as the rest of the computation still covers it.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>

namespace lowtide::shard {

// Elements of a unit's parameters whose gradients take as long to compute as
// gathering `bytes` (of all ranks) takes: 4 FLOPs for each element and token,
// its own gradient and its share of the input's, at the full bf16 rate, against
// (ranks - 1) / ranks of the bytes over one link.
//
//   900 TFLOP/s, 3 TB/s within a GPU (one rank): 300 FLOPs a byte
//   900 TFLOP/s, 300 GB/s between the 8 GPUs of a node: 3000 FLOPs a byte
//   900 TFLOP/s, 45 GB/s between nodes: 20000
//
// These are an H100's; kernels reach half of that rate, so the wire has twice
// the time it needs.  `tokens`: rows of the unit's output; 0: not known, which
// nothing covers.
std::int64_t elements_that_cover(std::int64_t bytes, std::int64_t ranks,
                                 std::int64_t tokens);

// How many gradients of `elements`, in the order they are expected, come before
// the gather: as many as leave `cover` elements to come when the one after them
// is there as well.  elements.size() at most: the gather leaves with the unit's
// last gradients.
std::size_t gradients_before_gather(c10::ArrayRef<std::int64_t> elements,
                                    std::int64_t cover);

}  // namespace lowtide::shard
