// The gradient side of one unit: which parameters take part, in which dtype
// their gradients travel, and how far they have come in this backward.
// GradientStream moves them; this class only knows where everything stands.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "memory/device_memory.h"
#include "memory/flat_layout.h"
#include "shard/gradients/gradient_plan.h"
#include "shard/gradients/gradient_reduction.h"
#include "shard/gradients/gradient_ring.h"
#include "shard/gradients/gradient_rows.h"
#include "shard/gradients/gradient_slab.h"
#include "shard/gradients/lane_plan.h"
#include "shard/gradients/partial_gradients.h"
#include "shard/gradients/sharded_gradients.h"
#include "shard/gradients/used_elsewhere.h"
#include "shard/parameter_info.h"
#include "shard/policy.h"
#include "shard/unit_name.h"

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

// How far a gradient has come in this backward.
enum class Arrival : std::uint8_t {
  awaited,   // nothing so far
  held,      // more may come: not to be copied before the unit is sealed
  complete,  // all of it; of one in blocks of rows: of those that have come
};

// What layers did instead of giving autograd a gradient that is summed in
// place, in this backward.
enum class Product : std::uint8_t { none, offered, added };

class UnitGradients {
 public:
  struct Place {
    std::int32_t chunk;
    std::int32_t piece;
  };
  struct Parameter {
    std::int64_t numel = 0;
    std::int64_t shard_numel = 0;
    bool fused = false;      // as asked: it is to have a lane of its own
    std::int32_t lane = -1;  // -1: frozen
    std::vector<Place> places;

    // --- in this backward ---------------------------------------------------
    Arrival arrival = Arrival::awaited;
    Product product = Product::none;
    // Its gradient until it is copied into every chunk it belongs to.
    at::Tensor source;
    std::int32_t pieces_written = 0;
    // A gradient that comes in blocks of rows, in order (row_stream.h).
    struct Rows {
      std::int64_t numel = 0;    // of a row; 0: it comes whole
      std::int64_t at_once = 0;  // rows of every rank's shard that a block has
      std::int64_t seen = 0;
      std::vector<at::Tensor> blocks;  // undefined once copied
      std::int64_t strip() const { return at_once * numel; }
    };
    Rows rows;

    bool produced() const { return arrival != Arrival::awaited; }
    // Its next piece belongs to that chunk of its lane and can be copied.
    bool next_piece_is_for(std::int32_t chunk, bool sealed) const;
    // It waits for others of its chunk ([Note: Small gradients]).
    bool waits_as_small() const;
    const at::Tensor& next_source() const;
    // Notes that it was copied; returns the tensor that nobody needs any more.
    at::Tensor piece_written_from();
    // A new backward begins.
    void begin();
  };

  // `reduction`: what the unit's settings say, which outlive it; `host`: see
  // ShardedGradients.
  UnitGradients(UnitName unit, ParameterInfos infos,
                const memory::FlatLayout& layout,
                std::shared_ptr<comm::Collectives> group,
                const GradientReduction& reduction,
                std::shared_ptr<memory::DeviceMemory> memory,
                std::shared_ptr<memory::HostMemory> host = nullptr);

  // Parameter i's gradient comes in blocks of rows; takes effect with the next
  // plan.
  void stream_rows(std::int32_t i, std::int64_t row_numel) {
    parameter(i).rows.numel = row_numel;
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

  // In which order gradients are expected: a permutation of all parameters, the
  // same on every rank; takes effect with the next plan.  At first backward is
  // expected to complete them in reverse.
  void expect(std::vector<std::int32_t> order) { order_ = std::move(order); }
  // Chooses the trainable parameters and the cuts.  Only between backwards,
  // with no slab allocated and the same arguments on every rank.
  void plan(const std::vector<bool>& trainable, std::int64_t budget_bytes);
  // Adds what it lacks, between backwards, with gradients accumulated or not:
  // see [Note: Frozen or not in between].
  void extend_plan(const std::vector<bool>& trainable,
                   std::int64_t budget_bytes);
  bool plans_all(const std::vector<bool>& trainable) const;
  // No other parameter is in the plan, kept for a gradient that it had.
  bool plans_only(const std::vector<bool>& trainable) const;

  const std::string& unit() const { return *unit_; }
  // Of its unit among its root's.
  std::int32_t number() const { return number_; }
  void set_number(std::int32_t number) { number_ = number; }
  const std::string& name_of(std::int32_t i) const { return infos_.of(i).name; }
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
  // Of their gradients, those that every token has a share in.
  std::vector<std::int64_t> elements() const;
  // All parameters, those first whose gradients came first in the backward that
  // has just ended; the others as planned.
  std::vector<std::int32_t> observed_order() const;
  // A gradient of i has come, all of it unless `hold`.
  void arrives(std::int32_t i, bool hold);
  // Leases where results will land, at first use in a backward; returns whether
  // it did.  Results that stay with the shards have no place in `.grad` yet.
  bool prepare_results();
  // `pieces` have been reduced over the shards to `row`, which may be changed:
  // on their way to `.grad`, or to the sum over replicas.  `flags`: undefined
  // if they come with another row.  On the current stream.
  void land(const Lane& lane, const std::vector<Piece>& pieces,
            const at::Tensor& row, const at::Tensor& flags);
  // The same behind that sum; flags of `pieces` from that column on.
  void land_sum(const at::Tensor& row, const std::vector<Piece>& pieces,
                std::int64_t flags_column);
  // All of them have landed that do in this backward; see
  // [Note: Gradients on the host].  On the current stream.
  void all_landed(GradientRing& ring);
  ShardedGradients& sharded() { return sharded_; }
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
  // `own`: they are longer than other units' and leased when its own gradients
  // come; ahead of a plan, takes effect with the next backward.
  void set_slots(std::int64_t number, bool own) {
    num_slots_ = number;
    own_slots_ = own;
  }
  bool own_slots() const { return own_slots_; }
  std::int64_t num_slots() const { return num_slots_; }
  // How many bytes fewer are there once the unit's backward is over than while
  // it ran, its parameters and their gradients aside.
  void set_room(std::int64_t bytes) { room_ = bytes; }
  std::int64_t room() const { return room_; }
  // Bytes of gradients of the units before it that may still wait for the wire
  // while this unit's backward runs ([Note: A wire that is slower than
  // backward]).
  void set_lingering(std::int64_t bytes) { lingering_bytes_ = bytes; }
  std::int64_t lingering_bytes() const { return lingering_bytes_; }
  // Most of its elements are experts' ([Note: A wire that is slower than
  // backward]).
  bool of_experts() const;
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
  // The flat buffers that those wait in.
  std::vector<at::Tensor> waiting_buffers() const;
  // Between backwards: what waits of i, for who keeps it elsewhere and brings
  // it back into a unit over as many ranks.  Undefined: nothing.
  struct Waiting {
    // Gradients of its unit may wait in the slab, on this rank or another.
    bool accumulating = false;
    at::Tensor unreduced;  // GradientSlab::read
    at::Tensor partial;    // PartialGradients::read
  };
  Waiting waiting(std::int32_t i) const;
  // Where nothing waits of i, which is in the plan.  The same parameters on
  // every rank.
  void bring_back(std::int32_t i, const Waiting& waiting);
  // Between backwards: forgets those of i.  What leaves, and in which order,
  // stays the same.
  void drop(std::int32_t i);
  // The backward is over: without sync the slabs stay, with sync they go.
  void end();
  // Those that any rank produced since the last reduction become `.grad`, once
  // they have landed, and those of `in_any_case` (by number; empty: none).
  // Returns whether there are any.
  bool publish(const std::vector<bool>& in_any_case,
               const ShardedGradients::Wrap& wrap);
  // What this rank leaves out in this backward the hosts will tell of, if they
  // can: not of sums that an earlier backward left, nor before its end.
  void expect_hosts_to_tell(bool expect) {
    hosts_tell_ = expect && sync_ && !on_landed && !reduction_.unused_too &&
                  !reduction_.keeps_partial() && partial_.flats().empty();
  }
  bool hosts_tell() const { return hosts_tell_; }
  void told(const std::function<bool(std::int32_t)>& used) {
    used_elsewhere_.told(used);
  }
  // A gradient of a parameter that others may have had, ever.
  bool left_out() const { return used_elsewhere_.ever_asked(); }
  // Throws lowtide::Error where UsedElsewhere::changed() says so.
  void require_as_captured() const;
  // Whether this rank did.
  bool used_here(std::int32_t i) const;
  // What a gradient that does not exist is sent as.
  double missing() const { return reduction_.unused_too ? 0.0 : kNeutral; }
  // Gradients of i wait in the slab.
  bool touched(std::int32_t i) const {
    const auto lane = parameters_[static_cast<std::size_t>(i)].lane;
    return lane >= 0 && lanes_[static_cast<std::size_t>(lane)].slab.touched(i);
  }
  void abort();

 private:
  // See UsedElsewhere::ask.
  void ask_who_used(const std::vector<std::int32_t>& parameters,
                    const std::vector<std::int32_t>& columns,
                    const at::Tensor& flags);
  // To the slab, which all are of, each once.
  void add(GradientSlab& slab,
           const std::vector<GradientSlab::Gradient>& gradients);
  void add_lanes(const std::vector<bool>& takes_part,
                 std::int64_t budget_bytes);
  UnitName unit_;
  ParameterInfos infos_;
  std::shared_ptr<comm::Collectives> group_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::vector<Parameter> parameters_;
  std::vector<std::int32_t> order_;
  std::vector<std::int32_t> trainable_;
  std::vector<std::int32_t> completed_;
  std::vector<Lane> lanes_;
  ShardedGradients sharded_;
  PartialGradients partial_;
  UsedElsewhere used_elsewhere_;
  const GradientReduction& reduction_;
  std::vector<GradientSlab::Gradient> small_;
  std::int32_t number_ = -1;
  std::int64_t source_bytes_ = 0;
  std::int64_t room_ = 0;
  std::int64_t num_slots_ = kRingSlots;
  bool own_slots_ = false;
  std::int64_t lingering_bytes_ = 0;
  bool sync_ = true;
  bool accumulating_ = false;
  bool sealed_ = false;
  bool leaves_early_ = false;
  bool hosts_tell_ = false;
};

}  // namespace lowtide::shard
