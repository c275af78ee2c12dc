// Parameters that are split along another dimension than the first.
//
// [Note: Other dimensions]
// A rank's contiguous piece of such a parameter is not a run of it: pieces
// arrive as [N, outer, width] and are copied to [outer, N, width].  (A strided
// view instead would give matmuls another layout.)  Small ones share the packed
// row.  Each of the others arrives in a buffer of its own, gets its place when
// all are there, and gives that buffer back before the next one gets its place:
// beside what is in place there is one parameter twice, not the unit, and what
// one leaves is as large as what the next one of its shape needs.  Master,
// gradients and results see a flat parameter of numel / N elements a rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory/device_memory.h"
#include "shard/parameter_info.h"
#include "shard/parameters/kept_part.h"
#include "shard/storage.h"
#include "shard/unit_name.h"

namespace lowtide::shard {

class TurnedParameters {
 public:
  TurnedParameters(UnitName unit, std::shared_ptr<memory::DeviceMemory> memory);

  // Parameter `index` of the unit, split over `ranks`, with elements.  Returns
  // what a gather writes to: uint8, all of its bytes.
  at::Tensor add(std::size_t index, const ParameterInfo& info,
                 std::int64_t ranks);

  // Leases what a gather writes to.  Nothing has changed if it throws.
  void lease_arriving();
  // Behind the gather, on the compute stream.  If a lease throws, the next call
  // goes on where this one stopped.
  void put_in_place();
  void drop_arriving();

  // Leases the places alone: what comes from kept parts is turned already.
  // Nothing has changed if it throws.
  void lease_places();
  void drop();
  // Calls bind(index, its place, the number of bytes) for each in place.
  template <typename Bind>
  void for_each_place(Bind bind) const {
    for (const auto& turned : turned_) {
      if (turned.place.data() != nullptr) {
        bind(turned.index, turned.place, turned.bytes);
      }
    }
  }
  void append_runs(std::vector<KeptPart::Run>& runs) const;

  // Of their places, and as many of what a gather writes to.
  std::int64_t bytes() const { return bytes_; }

 private:
  struct Turned {
    std::size_t index;
    std::int64_t bytes;
    // The parameter's own storage shows the bytes of its place: a process group
    // may hold what it writes to for longer.
    RepointedStorage arriving;
    RepointedStorage place;
    at::Tensor from;  // [outer, N, width]
    at::Tensor to;
  };

  UnitName unit_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::vector<Turned> turned_;
  std::int64_t bytes_ = 0;
};

}  // namespace lowtide::shard
