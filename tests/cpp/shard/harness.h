// One rank of a sharded model on the ScriptedRuntime: units, their root and
// what the bindings do around a module's forward, with the user's kernels
// entered in the runtime's log.
//
//   forward <unit>        after pre_forward; reads the unit's parameters
//   backward <unit>       before the unit's first node, likewise
//   backward end <unit>   after its last one; only where the input needs grad
//   optimizer             reads gradients, writes shards
//
// Lives on one thread, whose torch allocations the runtime watches.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers.h"
#include "memory/device_memory.h"
#include "naive.h"
#include "rank_collectives.h"
#include "shard/root.h"
#include "shard/unit.h"
#include "skipping_runtime.h"
#include "testing/scripted_runtime.h"

namespace lowtide::shard {

class Rank final : public Layers {
 public:
  // The exchange outlives the rank; `offloaded`: all units are; `compared`: it
  // tells the others what it did.
  Rank(Exchange& exchange, std::int64_t rank,
       const std::vector<UnitSpec>& units, bool offloaded = false,
       bool compared = false);
  ~Rank() override;

  at::Tensor call(std::size_t unit, const at::Tensor& x,
                  const Body& body) override;
  std::int64_t rank() const override { return collectives->rank(); }

  // Writes those rows of full parameters into the shards.
  void load(const Parameters& parameters);
  // Naive rule's `optimize` for every shard with a gradient, on compute.
  void optimize();
  void zero_grad();
  void set_sync(bool sync);
  // The unit dies, as when a module is deleted; the program must not call it.
  void drop(std::size_t u);

  std::size_t size() const { return units_.size(); }
  Unit& unit(std::size_t u) { return *units_[u]; }
  const at::Tensor& shard(std::size_t u, std::size_t p) const {
    return shards_[u][p];
  }
  // The full parameter that autograd sees; a hook of it watches its gradient.
  const at::Tensor& leaf(std::size_t u, std::size_t p) const {
    return leaves_[u][p];
  }
  // This rank's rows of a full tensor that stands for parameter p of unit u.
  at::Tensor rows_of(std::size_t u, std::size_t p,
                     const at::Tensor& full) const;
  // Whether the unit's module shows the full parameters.
  bool shown(std::size_t u) const;

  // How shards' gradients or values differ from the full tensors; empty if not.
  std::string gradient_difference(const Parameters& full) const;
  std::string parameter_difference(const Parameters& full) const;
  // What is not back at rest between steps; empty if everything is.
  std::string unrest() const;

  std::int64_t live(memory::Category category) const;
  std::int64_t peak(memory::Category category) const;

  std::shared_ptr<device::ScriptedRuntime> runtime;
  std::shared_ptr<SkippingRuntime> waits;
  std::shared_ptr<memory::Ledger> ledger;
  std::shared_ptr<memory::DeviceMemory> memory;
  std::shared_ptr<memory::PinnedPool> pool;  // of what is offloaded
  std::shared_ptr<RankCollectives> collectives;
  std::shared_ptr<Root> root;
  // Called at every kernel with its name; what it throws is the kernel's error.
  std::function<void(const std::string& kernel)> on_kernel;
  // Called before a unit's gradients become `.grad`.
  std::function<void(const std::string& unit)> on_wrap;

 private:
  class View;

  void kernel(const std::string& what, std::size_t unit);
  template <typename Pick>
  std::string difference(const Parameters& full, Pick pick) const;

  std::vector<UnitSpec> specs_;
  std::vector<std::shared_ptr<Unit>> units_;
  std::vector<View*> views_;  // owned by the units
  Parameters shards_;
  Parameters leaves_;
  std::unique_ptr<device::AllocationObserver> watch_;
};

// Units 1 and 2, 3 and 4, ... stand beside each other, as of one `fully_shard`
// call over two meshes.
void stand_in_pairs(Rank& rank);

// [Note: A bystander]
// What units share is made for the most ranks that any of them has.  A unit
// more, frozen and never called, has 128 in tests of two or three, and the ring
// has one slot.
Scenario with_bystander(Scenario scenario);

// One step of the scenario on that rank without the optimizer; what it returns
// is the losses by microbatch.
std::vector<at::Tensor> run_step(Rank& rank, const Scenario& scenario,
                                 int step);

// Trains the scenario on `world_size` ranks and compares losses, gradients and
// parameters of every step with the naive rule, bit by bit, and that the stream
// order was kept.  `prepare` runs on every rank before the first step.
void expect_naive_bits(const Scenario& scenario, std::int64_t world_size,
                       const std::function<void(Rank& rank)>& prepare = {});

}  // namespace lowtide::shard
