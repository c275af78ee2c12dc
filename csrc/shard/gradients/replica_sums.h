// Sums over replicas: what follows a unit's reduce-scatters on a mesh of two
// dimensions, or where the user's hook changes reduced gradients.
//
// A unit's sum leaves behind the first parcel of the next unit, or at the end:
// its own last parcel has had that time on the wire.  Its results are waited
// for when the sum after it leaves.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/collectives.h"
#include "memory/device_memory.h"
#include "shard/gradients/gradient_ring.h"
#include "shard/gradients/partial_gradients.h"
#include "shard/gradients/unit_gradients.h"
#include "shard/step_log.h"

namespace lowtide::shard {

class ReplicaSums {
 public:
  // All outlive it.
  ReplicaSums(memory::DeviceMemory& memory, GradientRing& ring, StepLog& log)
      : memory_(memory), ring_(ring), log_(log) {}

  // The unit's last parcel, before place `places`, has left.
  void add(UnitGradients& unit, std::size_t places);
  // Starts those of all units but `leaving`, which has more to send; null: of
  // all.  `land_until` lands the parcels that a sum is made of.
  void start(const UnitGradients* leaving,
             const std::function<void(std::size_t places)>& land_until);
  // Waits for the one on its way, in reduce's order, and lands its results.
  void finish();

  std::vector<comm::Pending*> in_flight() const;
  void clear();

 private:
  struct Left {
    UnitGradients* unit;
    std::size_t places;
  };
  struct Sum {
    UnitGradients* unit;
    std::vector<PartialGradients::Flat> flats;
    std::vector<std::unique_ptr<comm::Pending>> pending;  // null: no replicas
  };

  memory::DeviceMemory& memory_;
  GradientRing& ring_;
  StepLog& log_;
  std::deque<Left> waiting_;
  std::optional<Sum> sum_;  // on its way
};

}  // namespace lowtide::shard
