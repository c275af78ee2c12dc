// A unit's parameters between their shards and the module that reads them:
// gathered, there, given back.
//
// Threads: one at a time; without the GIL around `gather` and `arrive`.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/collectives.h"
#include "memory/device_memory.h"
#include "shard/parameter_info.h"
#include "shard/parameters/parameter_buffers.h"
#include "shard/parameters/parameter_leaves.h"
#include "shard/parameters/seen_shards.h"
#include "shard/unit_state.h"

namespace lowtide::shard {

class UnitParameters {
 public:
  UnitParameters(const UnitName& unit, const ParameterInfos& infos,
                 const comm::Collectives& ranks,
                 const std::shared_ptr<memory::DeviceMemory>& memory,
                 const std::shared_ptr<memory::HostMemory>& host);
  // A gather that is under way is abandoned: its bytes go back to compute.
  ~UnitParameters();
  UnitParameters(const UnitParameters&) = delete;
  UnitParameters& operator=(const UnitParameters&) = delete;

  const ParameterInfos& infos() const { return infos_; }
  UnitState state() const { return state_.state(); }
  ParameterBuffers& buffers() { return buffers_; }
  const ParameterBuffers& buffers() const { return buffers_; }
  ParameterLeaves& leaves() { return leaves_; }
  const ParameterLeaves& leaves() const { return leaves_; }

  // Tensors on the shards' bytes, whose writes make gathered ones stale.
  void watch_shards(const std::vector<at::Tensor>& shards,
                    const std::vector<at::Tensor>& locals) {
    seen_shards_.watch(shards, locals);
  }
  // Gathered or on their way.
  bool here() const {
    return state() == UnitState::gathering || state() == UnitState::unsharded;
  }
  // Shards have changed since; `optimizer_steps`: that have been taken.
  bool stale(std::int64_t optimizer_steps) const {
    return seen_shards_.changed(optimizer_steps);
  }

  // They are gathered, or about to be, for a forward that has not come yet.
  bool ahead() const { return ahead_; }
  void set_ahead(bool ahead) { ahead_ = ahead; }

  // Issues the all-gather over `shards`, or, if `from_kept` and a part was
  // kept, over that group.  They must not be here.  `timed`: see
  // [Note: Measured gathers].
  void gather(comm::Collectives& shards, comm::Collectives* from_kept,
              std::int64_t optimizer_steps, bool timed);
  // Of timed gathers, nanoseconds; 0: not known.
  std::int64_t gather_ns() { return gather_time_.least_ns(runtime_); }
  // Compute may read the parameters afterwards; nothing if no gather is under
  // way.  Returns whether an extension has made full parameters now.
  bool arrive();
  // The modules show the shards, and the bytes go back, also those that were
  // kept before, or stay for the next gather (`keep`); a gather must have
  // arrived.
  void reshard(bool keep = false);
  // The same, but this rank's part of `group` stays ([Note: Kept parts]).
  void reshard_but_part(const comm::Collectives& group, bool keep = false);
  // The same at the end of the unit's backward: its gradients are on their way.
  void seal(bool keep = false);
  // They all have landed.
  void drain();
  // Waits for what is under way, ignoring failures, and gives everything back.
  void abort();

 private:
  void count_writes();

  UnitName unit_;
  ParameterInfos infos_;
  ParameterBuffers buffers_;
  ParameterLeaves leaves_;
  UnitStateMachine state_;
  SeenShards seen_shards_;
  const device::Runtime& runtime_;
  GatherTime gather_time_;
  std::unique_ptr<comm::Pending> pending_;
  bool from_parts_ = false;
  bool ahead_ = false;
};

}  // namespace lowtide::shard
