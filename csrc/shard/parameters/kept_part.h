// What a unit keeps of its gathered parameters between forward and backward.
//
// [Note: Kept parts]
// Instead of giving all gathered bytes back, a unit may keep one of `parts`
// equal parts of every parameter, in the compute dtype, and gather the rest
// from that many ranks, each with another part.  Rank order must be part order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/device_memory.h"
#include "shard/storage.h"
#include "shard/unit_name.h"

namespace lowtide::shard {

class KeptPart {
 public:
  // Bytes of a gathered buffer; a multiple of the number of parts.
  struct Run {
    const RepointedStorage* buffer;
    std::int64_t offset;
    std::int64_t bytes;
  };

  KeptPart(UnitName unit, std::shared_ptr<memory::DeviceMemory> memory);

  bool any() const { return bytes_ > 0; }
  // Copies part `index` out of every run, on the compute stream.
  void keep(c10::ArrayRef<Run> runs, std::int64_t index, std::int64_t parts);
  // What one coalesced all-gather from `parts` ranks writes and sends, uint8.
  struct Lists {
    std::vector<at::Tensor> outs;
    std::vector<at::Tensor> ins;
  };
  Lists lists(c10::ArrayRef<Run> runs, std::int64_t parts) const;
  void drop();

 private:
  UnitName unit_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  RepointedStorage storage_;
  std::int64_t bytes_ = 0;
};

}  // namespace lowtide::shard
