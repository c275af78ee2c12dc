// What decides how a unit works: what a user may set, between steps and alike
// on every rank, and what is known of its modules.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "memory/host_memory.h"
#include "shard/gradients/gradient_reduction.h"
#include "shard/prefetch.h"

namespace lowtide::shard {

class Unit;

struct UnitSettings {
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  // Resharding leaves the gathered bytes where they are, for the next gather:
  // the full parameters keep their addresses.
  bool keep_unsharded_storage = false;
  // If set, what `reshard_after_forward` leaves is not this rank's shard but
  // its part of the parameters over this smaller group, from which backward
  // gathers; see kept_part.h.
  std::shared_ptr<comm::Collectives> post_forward_group;
  // Whether backwards reduce gradients; without, they accumulate in slabs.
  bool gradient_sync = true;
  // False: the user knows that backward does not read the parameters.
  bool unshard_in_backward = true;
  // Units that are gathered ahead instead of the next in the recorded order,
  // where not empty.
  Prefetch::Listed forward_prefetch;
  Prefetch::Listed backward_prefetch;
  GradientReduction reduction;
  // Called when a backward has made gradients of the unit visible, behind their
  // post-accumulate hooks and on the stream that reduced them: an optimizer in
  // backward, which takes them.  May throw, may take the GIL.
  std::function<void()> on_gradients;
  // Where shards and reduced gradients are, if not on the device; what a unit
  // is made with holds for it.
  std::shared_ptr<memory::HostMemory> host;

  // Other units run inside this one's forward.
  bool encloses_units = false;
  // Units of the same modules, over other meshes: see [Note: Units beside each
  // other].
  std::vector<std::weak_ptr<Unit>> beside;
  // The module is a single one of torch.nn's: nothing inside it can recompute,
  // so when autograd saved none of its parameters backward does not gather
  // them.
  bool leaf_module = false;

  // A number of all that decides which collectives are issued, to be compared
  // over ranks, and what differs from the defaults, by the names that
  // fully_shard and the methods of its modules have for it.
  std::uint64_t hash() const;
  std::string text() const;
};

}  // namespace lowtide::shard
