// The bytes gradients leave from: slots of equal size that chunks take turns
// in, and sources on their way into them.
//
// Slots are leased as they are first needed and go back when the backward
// ends.  A source is released on `compute` after its copy on `reduce`; sources
// of up to a budget may be waiting for that, beyond it compute waits.  Either
// stream waits for the other only when that one has work or memory for it
// since the last time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "memory/device_memory.h"

namespace lowtide::shard {

class GradientRing {
 public:
  // `root`: owner of the slots in the ledger.
  GradientRing(std::string root, std::shared_ptr<memory::DeviceMemory> memory);

  // Slots leased from now on have at least that many bytes.
  void fit(std::int64_t slot_bytes);
  // The bytes of slot i, 0 <= i < kMostRingSlots, at least `bytes`; nothing is
  // on its way from it.  A longer slot than is needed now is retired.  Nobody
  // writes to padding: new bytes, and those that were of another dtype, are
  // zeroed on `reduce`, or checks of what is sent would find NaN in them.
  const c10::Storage& slot(std::size_t i, std::int64_t bytes,
                           at::ScalarType dtype);
  // Slots from i on that nothing is on its way from are retired: units that had
  // more than i are over.
  void retire_slots(std::size_t i);
  // All slots go back in the compute stream's order; nothing is on its way from
  // them.
  void drop_slots();

  // What has just been used on `reduce`: sources that were copied, results that
  // landed.
  void retire(std::vector<c10::Storage> storages, std::int64_t bytes);
  // The same for what was used elsewhere, until `used`: behind what `reduce`
  // has enqueued so far, and behind what was retired so before.
  void retire(c10::Storage storage, device::Event used);
  // All but the newest `keep_bytes` of retired sources go back now: compute
  // waits for their copies.
  void reclaim(std::int64_t keep_bytes);

  // Of sources that wait for compute to be ordered behind their copy.
  std::int64_t retired_bytes() const { return retired_bytes_; }

  // One stream has something the other must wait for before it goes on.
  void compute_has_moved() { reduce_behind_ = true; }
  void reduce_has_moved() { compute_behind_ = true; }
  // Work on `reduce` from now on finds what compute made: sources, slots, the
  // buffers results land in.
  void catch_up_reduce();
  // Compute from now on finds results in place, and retired sources go back.
  void catch_up_compute();

  // Everything goes back, in the compute stream's order.
  void release();

 private:
  struct Retired {
    std::vector<c10::Storage> storages;
    device::Event used;
    std::int64_t bytes;
    bool on_reduce;  // in that stream's order
  };

  void zero(const c10::Storage& slot);
  // Compute, for what was retired before `end`; of `reduce` if asked to.
  void wait_for_retired(std::deque<Retired>::const_iterator end,
                        bool of_reduce);

  std::string root_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::vector<c10::Storage> slots_;
  std::vector<at::ScalarType> dtypes_;  // of the values in them
  std::int64_t slot_bytes_ = 0;
  std::deque<Retired> retired_;
  std::int64_t retired_bytes_ = 0;
  bool reduce_behind_ = false;   // compute has what reduce must wait for
  bool compute_behind_ = false;  // and the other way round
};

}  // namespace lowtide::shard
