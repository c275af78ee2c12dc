// What leaves in one reduce-scatter, and its results' way to `.grad`: a chunk
// of the unit's plan, in a slot of the ring, or a whole slab.
//
// A parcel is opened, once what had its bytes before has landed; gradients are
// copied into it, or are in it already; it leaves, with -0.0 in the place of
// gradients that did not come (gradient_rows.h); it lands.  GradientStream
// says when.  Copies, collectives and landing run on the `reduce` stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/collectives.h"
#include "memory/device_memory.h"
#include "shard/gradients/gradient_ring.h"
#include "shard/gradients/unit_gradients.h"

namespace lowtide::shard {

class Parcel {
 public:
  // All outlive it.
  Parcel(UnitGradients& unit, std::int32_t lane, memory::DeviceMemory& memory,
         GradientRing& ring)
      : unit_(unit), lane_(lane), memory_(memory), ring_(ring) {}
  virtual ~Parcel() = default;

  UnitGradients& unit() const { return unit_; }
  Lane& lane() const { return unit_.lanes()[static_cast<std::size_t>(lane_)]; }
  // Among its lane's chunks; -1: a slab.
  virtual std::int32_t chunk() const { return -1; }

  // All that it carries is there, so it may leave before its unit is sealed.
  virtual bool complete() const = 0;
  // How many of its unit's gradients it waits for, of which parameter p's is
  // the turns[p]-th; one more than there are if for the unit to be sealed.
  virtual std::size_t gradients_for(
      const std::vector<std::size_t>& turns) const = 0;

  // It may be written from now on; `slot`: of the ring.
  virtual void open(std::size_t slot) = 0;
  bool is_open() const { return is_open_; }
  // Its collective is issued; what it lacks leaves as -0.0.
  virtual void leave() = 0;
  // Waits for its collective, in the order of the current stream.
  virtual void land() = 0;

  comm::Pending* pending() const { return pending_.get(); }
  // Of a slab that a gradient is summed in by its layers, while it is there.
  virtual std::int64_t in_place_bytes() const { return 0; }

 protected:
  bool is_open_ = false;
  std::unique_ptr<comm::Pending> pending_;
  UnitGradients& unit_;
  std::int32_t lane_;
  memory::DeviceMemory& memory_;
  GradientRing& ring_;
};

class ChunkParcel final : public Parcel {
 public:
  ChunkParcel(UnitGradients& unit, std::int32_t lane, std::int32_t chunk,
              memory::DeviceMemory& memory, GradientRing& ring);

  std::int32_t chunk() const override { return chunk_; }
  bool complete() const override;
  std::size_t gradients_for(
      const std::vector<std::size_t>& turns) const override;
  void open(std::size_t slot) override;
  // Pieces whose sources are there and not copied; small ones only with
  // `small_too`, they wait otherwise ([Note: Small gradients]).
  std::vector<std::size_t> ready(bool small_too);
  // Copies those pieces, once it is open.  Sources go back behind it.
  void write(c10::ArrayRef<std::size_t> pieces);
  // The source of a small piece has come, and waits.
  void hold_small_piece() { ++pieces_waiting_; }
  void leave() override;
  void land() override;

 private:
  const Chunk& plan() const {
    return lane().plan.chunks[static_cast<std::size_t>(chunk_)];
  }
  void fill_missing();

  std::int32_t chunk_;
  std::int32_t pieces_missing_;      // not copied
  std::int32_t pieces_waiting_ = 0;  // of these: small ones that have come
  at::Tensor input_;
  at::Tensor output_;
};

// A lane that gradients were summed in: its slab leaves as it is, in one
// coalesced call.
class SlabParcel final : public Parcel {
 public:
  using Parcel::Parcel;

  bool complete() const override;
  std::size_t gradients_for(
      const std::vector<std::size_t>& turns) const override;
  void open(std::size_t /*slot*/) override { is_open_ = true; }
  std::int64_t in_place_bytes() const override;
  void leave() override;
  void land() override;

 private:
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
};

}  // namespace lowtide::shard
