// When, in the backward of one unit, the gather of the next one leaves.
//
// At its beginning the gathered bytes would be there while the unit's values
// have been recomputed and its first gradients come: where the peak of a step
// is.  A backward that computes long enough does not need them yet, so the
// gather leaves as late as the rest of the computation still covers it.
#pragma once

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

class GatherPoint {
 public:
  // A unit's backward begins: gradients of `elements` in total will come, and
  // `cover` of them must be to come when the gather leaves.
  void begin(std::int64_t elements, std::int64_t cover) {
    to_come_ = elements;
    cover_ = cover;
  }
  // The gradient of that many elements is there.
  void came(std::int64_t elements) { to_come_ -= elements; }
  // Whether to gather now: when the next gradient, of that many elements, is
  // there it would be too late.
  bool reached(std::int64_t next_elements) const {
    return to_come_ - next_elements < cover_;
  }

 private:
  std::int64_t to_come_ = 0;
  std::int64_t cover_ = 0;
};

}  // namespace lowtide::shard
