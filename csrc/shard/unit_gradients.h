// The gradient side of one unit: which parameters take part, in which dtype
// their gradients travel, and how far they have come in this backward.
// GradientStream moves them; this class only knows where everything stands.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "memory/device_memory.h"
#include "memory/flat_layout.h"
#include "shard/gradient_plan.h"
#include "shard/gradient_reduction.h"
#include "shard/gradient_ring.h"
#include "shard/gradient_rows.h"
#include "shard/gradient_slab.h"
#include "shard/parameter_buffers.h"
#include "shard/partial_gradients.h"
#include "shard/sharded_gradients.h"

namespace lowtide::shard {

// Gradients of one wire dtype within a unit: a chunk never mixes dtypes.
struct Lane {
  at::ScalarType dtype;
  std::vector<std::int32_t> members;  // trainable parameters
  UnitPlan plan;
  GradientSlab slab;
  // Where its first chunk stands in the stream's sequence, while it is there.
  std::optional<std::size_t> place;
  // Of one parameter whose gradient is summed where it is sent from, in the
  // slab, with or without sync (docs/design/fused_gradients.md).
  bool in_place = false;
};

class UnitGradients {
 public:
  struct Place {
    std::int32_t chunk;
    std::int32_t piece;
  };
  struct Parameter {
    std::string name;
    std::int64_t numel = 0;
    std::int64_t shard_numel = 0;
    std::int32_t lane = -1;  // -1: frozen
    std::vector<Place> places;
    // This backward's gradient until it is copied into every chunk it belongs
    // to, or for good if it must be held.
    at::Tensor source;
    // The gradient may also come as blocks of rows, in order (row_stream.h):
    // how many elements a row has (0: it may not), how many rows of every
    // rank's shard a block has, how many blocks have come, and those of them
    // that wait for their chunk.
    std::int64_t row_numel = 0;
    std::int64_t block_rows = 0;
    std::int64_t blocks_seen = 0;
    std::vector<at::Tensor> blocks;
    std::int32_t pieces_written = 0;
    bool fired = false;
    bool produced = false;  // fired with a defined gradient
    bool held = false;      // not to be copied before the unit is sealed
    // Its gradient is to have a lane of its own.
    bool fused = false;
    bool added = false;     // to its slab, in this backward, by no node of it
    bool complete = false;  // of a lane of its own: it may leave
    bool offered = false;   // as a product, in this backward
    bool used = false;      // by some rank, if this one asked
  };

  UnitGradients(UnitName unit, const std::vector<ParameterInfo>& infos,
                const ParameterBuffers& buffers,
                std::shared_ptr<comm::Collectives> group,
                std::shared_ptr<memory::DeviceMemory> memory);

  // Parameter i's gradient comes in blocks of rows; takes effect with the next
  // plan.
  void stream_rows(std::int32_t i, std::int64_t row_numel) {
    parameter(i).row_numel = row_numel;
  }

  // Parameter i's gradient is summed in place, unless it comes in blocks of
  // rows; takes effect with the next plan.
  void fuse(std::int32_t i, bool fused) { parameter(i).fused = fused; }
  bool in_place(std::int32_t i) const {
    const auto lane = parameters_[static_cast<std::size_t>(i)].lane;
    return lane >= 0 && lanes_[static_cast<std::size_t>(lane)].in_place;
  }
  GradientSlab& slab(std::int32_t i) {
    return lanes_[static_cast<std::size_t>(parameter(i).lane)].slab;
  }

  // Chooses the trainable parameters, their order (parameters listed in the
  // order their gradients are expected) and the cuts.  Only between backwards,
  // with no slab allocated and the same arguments on every rank.
  void plan(const std::vector<bool>& trainable,
            const std::vector<std::int32_t>& order, std::int64_t budget_bytes);
  // Adds what it lacks, between backwards, with gradients accumulated or not:
  // see [Note: Frozen or not in between].
  void extend_plan(const std::vector<bool>& trainable,
                   const std::vector<std::int32_t>& order,
                   std::int64_t budget_bytes);
  // No other parameter is in the plan, kept for a gradient that it had.
  bool plans_only(const std::vector<bool>& trainable) const;

  const std::string& unit() const { return *unit_; }
  // Of its unit among its root's.
  std::int32_t number() const { return number_; }
  void set_number(std::int32_t number) { number_ = number; }
  void rename_parameters(const std::vector<std::string>& names);
  comm::Collectives& group() const { return *group_; }
  std::vector<Lane>& lanes() { return lanes_; }
  const std::vector<Lane>& lanes() const { return lanes_; }
  const Parameter& parameter(std::int32_t i) const {
    return parameters_[static_cast<std::size_t>(i)];
  }
  Parameter& parameter(std::int32_t i) {
    return parameters_[static_cast<std::size_t>(i)];
  }
  std::size_t size() const { return parameters_.size(); }
  // In the order of the plan.
  const std::vector<std::int32_t>& trainable() const { return trainable_; }
  // All parameters, those first whose gradients came first in the backward that
  // has just ended; the others as planned.
  std::vector<std::int32_t> observed_order() const;
  void completed(std::int32_t i) { completed_.push_back(i); }
  ShardedGradients& sharded() { return sharded_; }
  GradientReduction& reduction() { return reduction_; }
  const GradientReduction& reduction() const { return reduction_; }
  void use_group(std::shared_ptr<comm::Collectives> group) {
    group_ = std::move(group);
  }

  // Reduced over the shards, if more is to follow than that.
  PartialGradients& partial() { return partial_; }

  GradientColumns columns(std::int32_t i, std::int64_t begin,
                          std::int64_t end) const;
  std::int64_t num_chunks() const;
  // Bytes of one chunk slot: [N + 1, max columns] of the widest lane.
  std::int64_t slot_bytes() const;
  // Its slots are longer than other units' and leased when its own gradients
  // come; takes effect with the next backward.
  void set_own_slots(bool own) { own_slots_ = own; }
  bool own_slots() const { return own_slots_; }
  std::int64_t num_slots() const;
  // How many bytes fewer are there once the unit's backward is over than while
  // it ran, its parameters and their gradients aside.
  void set_room(std::int64_t bytes) { room_ = bytes; }
  std::int64_t room() const { return room_; }
  // Bytes of all gradients, padded, in the dtypes they travel in.
  std::int64_t wire_bytes() const;
  // Of slabs of gradients in place that live at once in a backward with sync.
  std::int64_t in_place_bytes() const;
  // Bytes of all slabs once allocated.
  std::int64_t slab_bytes() const;
  // Bytes of all gradients of one backward in the compute dtype; of a gradient
  // that comes in blocks of rows, two blocks' in the reduce dtype.
  std::int64_t source_bytes() const { return source_bytes_; }

  // A new backward; `sync`: it ends with a reduce-scatter.
  void begin(bool sync);
  bool sync() const { return sync_; }
  // An earlier backward without sync left gradients in the slabs.
  bool accumulating() const { return accumulating_; }

  // Where set, the unit lands as soon as its last chunk has left, and this runs
  // then, with `reduce` as the current stream; for one backward.
  std::function<void()> on_landed;

  bool sealed() const { return sealed_; }
  void seal() { sealed_ = true; }
  // Chunks may leave before the unit is sealed: what completes them comes
  // between the same calls of other units on every rank.
  bool leaves_early() const { return leaves_early_; }
  void set_leaves_early(bool early) { leaves_early_ = early; }

  // Adds to the slab, on the compute stream; a small gradient at `add_small` at
  // the latest ([Note: Small gradients]).
  void accumulate(std::int32_t i, at::Tensor gradient);
  void add_small();
  // The same for block `block` of rows of i.
  void accumulate_rows(std::int32_t i, std::int64_t block,
                       const at::Tensor& rows);
  // How many blocks of rows i has; what block `block` is as a gradient of its
  // own.
  std::int64_t num_blocks(std::int32_t i) const;
  GradientColumns block_columns(std::int32_t i, std::int64_t block) const;
  // Between backwards: gradients of some parameter wait for a reduction, over
  // the shards or over the replicas.
  bool waiting() const;
  // Between backwards: forgets those of i.  What leaves, and in which order,
  // stays the same.
  void drop(std::int32_t i);
  // The backward is over: without sync the slabs stay, with sync they go.
  void end();
  // Whether any rank produced a gradient for i since the last reduction.
  bool used_by_any_rank(std::int32_t i) const;
  // Whether this rank did for all members of the lane.
  bool used_all(const Lane& lane) const;
  bool used_here(std::int32_t i) const;
  // Gradients of i wait in the slab.
  bool touched(std::int32_t i) const {
    const auto lane = parameters_[static_cast<std::size_t>(i)].lane;
    return lane >= 0 && lanes_[static_cast<std::size_t>(lane)].slab.touched(i);
  }
  // Whether another rank did, as the flag says after the sum; only a rank that
  // left a parameter of the lane without a gradient reads it.
  void note_use(std::int32_t i, bool used) { parameter(i).used = used; }

  void abort();

 private:
  void choose_blocks(std::int64_t budget_bytes);
  void add_lanes(const std::vector<bool>& takes_part,
                 const std::vector<std::int32_t>& order,
                 std::int64_t budget_bytes);

  UnitName unit_;
  std::vector<ParameterInfo> infos_;
  std::shared_ptr<comm::Collectives> group_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::vector<Parameter> parameters_;
  std::vector<std::int32_t> trainable_;
  std::vector<std::int32_t> completed_;
  std::vector<Lane> lanes_;
  ShardedGradients sharded_;
  PartialGradients partial_;
  GradientReduction reduction_;
  std::vector<GradientSlab::Gradient> small_;
  std::int32_t number_ = -1;
  std::int64_t source_bytes_ = 0;
  std::int64_t room_ = 0;
  bool own_slots_ = false;
  bool sync_ = true;
  bool accumulating_ = false;
  bool sealed_ = false;
  bool leaves_early_ = false;
};

}  // namespace lowtide::shard
