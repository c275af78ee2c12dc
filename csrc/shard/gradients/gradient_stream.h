// Streams the gradients of all units under one root out to their owners
// in parcels, most of them through a bounded ring.
//
// Order.  Before a backward begins, every parcel of every unit that takes part
// gets its place in one sequence, the same on every rank.  Chunks leave in
// that order and no other: issuing collectives as gradients happen to complete
// deadlocks as soon as two ranks differ.
//
// Window.  Chunks take the slots of the ring in turn: one may be written when
// the chunk that had its slot has left.  A gradient ahead of that window keeps
// its source tensor until the window reaches it.
// Casts into slots, results' way to `.grad` and the waits for collectives run
// on the `reduce` stream.
//
// A unit is *sealed* when no more gradients can come for it in this backward;
// what is missing then leaves as -0.0 (see gradient_rows.h).
//
// [Note: One order over all communicators]
// Which parameters of a unit a rank uses, and when their gradients come, is its
// own affair; in which order its collectives leave is not, whatever
// communicator they are on.  So everything that leaves during a backward has a
// place between chunks: the next unit's gather is ahead of one (`precede`), a
// unit's sum over replicas behind one.  A chunk leaves as soon as it is full
// only while its unit's backward runs (UnitGradients::leaves_early); all others
// leave when their unit is sealed, which happens between the same two units on
// every rank (Schedule::is_over where a unit's own inputs do not tell).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/collectives.h"
#include "memory/device_memory.h"
#include "shard/gradients/gradient_ring.h"
#include "shard/gradients/parcel.h"
#include "shard/gradients/replica_sums.h"
#include "shard/gradients/unit_gradients.h"
#include "shard/policy.h"
#include "shard/step_log.h"

namespace lowtide::shard {

class GradientStream {
 public:
  // `log` outlives it.
  GradientStream(std::string root, std::shared_ptr<memory::DeviceMemory> memory,
                 StepLog& log);

  void begin();  // a backward
  // A unit that takes part with sync, behind the others in the sequence: in the
  // order their gradients are expected to complete, the same on every rank.
  void append(UnitGradients& unit);
  bool contains(const UnitGradients& unit) const;

  // The backward of `unit` begins; its gradients come next.
  void expects(UnitGradients& unit);

  // Parameter i's gradient is complete and ready on the compute stream;
  // undefined: it fired without one.  `hold`: more may follow in this backward
  // (nested graph), so it stays here until the unit is sealed.
  // Throws lowtide::Error for a gradient that comes after its unit was sealed.
  void accept(UnitGradients& unit, std::int32_t i, at::Tensor gradient,
              bool hold);

  // Adds to parameter i's gradient where it is summed in place, in the compute
  // stream's order; `accept` follows when all of it is there.  `add` writes to
  // i's slab.  Throws as accept does.
  void add_in_place(UnitGradients& unit, std::int32_t i,
                    const std::function<void(GradientSlab& slab)>& add);
  // Makes room for i's slab, which is about to be written.
  void make_room(UnitGradients& unit, std::int32_t i);

  // Block `block` of parameter i's rows, [N * rows, row_numel], in any dtype:
  // every rank's rows of it in rank order.  Blocks come in order, all of them,
  // once in a backward.
  void accept_rows(UnitGradients& unit, std::int32_t i, std::int64_t block,
                   at::Tensor rows);

  void seal(UnitGradients& unit);
  // Seals those whose turn has come for as long as `is_over` says so.
  void seal_leading(
      const std::function<bool(const UnitGradients& unit)>& is_over);

  // `gather`, of another unit, leaves ahead of the first chunk of `unit` that
  // waits for more than the first `num_gradients` of its gradients, at least
  // one; then at the latest `gather` is called, once.
  void precede(const UnitGradients& unit, std::size_t num_gradients,
               std::function<void()> gather);
  // Calls it now if nothing has to leave ahead of it.
  void gather_if_next(const UnitGradients& unit);

  // Seals and sends what is left and lands everything; afterwards every
  // result is in place in the compute stream's order and the ring is gone.
  void finish();

  // Waits for what is in flight, ignoring failures, and drops everything.
  void abort();
  // The same in the compute stream's order, without blocking the host.
  void abandon();

  const GradientRing& ring() const { return ring_; }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  struct Entry {
    std::unique_ptr<Parcel> parcel;
    ChunkParcel* chunk = nullptr;  // the same, unless it is a slab
    std::size_t slot = 0;
    // The place of the parcel that had the slot before; kNone: nobody.
    std::size_t before = kNone;
    // Everything before this place has left once this one may be written.
    std::size_t opens_at = 0;
  };
  struct Gather {
    const UnitGradients* unit;
    std::size_t place;  // of the parcel it is ahead of
    std::function<void()> issue;
  };

  void add_entry(Entry entry);
  Parcel& parcel(std::size_t place) const { return *entries_[place].parcel; }
  bool last_of_unit(std::size_t place) const;
  bool in_window(std::size_t place) const;
  bool may_leave(const Parcel& parcel) const;
  void issue_gathers(std::size_t place);

  void produces(const UnitGradients& unit);
  void require_here(const UnitGradients& unit, std::int32_t i) const;
  void open(std::size_t place);
  // Nothing if there are none.
  void write(std::size_t place, c10::ArrayRef<std::size_t> pieces);

  void pump();
  void leave_complete();
  void leave(std::size_t place);
  void land(std::size_t place);
  // What has left before `place`.
  void land_until(std::size_t place);
  // All but `keep_bytes` of slabs in place that have left.
  void land_in_place(std::int64_t keep_bytes);
  void start_sums(const UnitGradients* leaving);
  // Lands a unit whose last parcel has left and runs its `on_landed`.
  void show(UnitGradients& unit);
  std::vector<comm::Pending*> in_flight() const;
  void clear();

  std::shared_ptr<memory::DeviceMemory> memory_;
  StepLog& log_;
  GradientRing ring_;
  ReplicaSums sums_;
  std::vector<Entry> entries_;
  std::vector<UnitGradients*> units_;
  std::vector<Gather> gathers_;
  std::size_t next_ = 0;    // the first entry that has not left
  std::size_t opened_ = 0;  // the first one that may not be written yet
  std::size_t landed_ = 0;  // the first one that has not landed
  std::size_t turn_ = 0;    // of the slots
  // Which place had each slot last.
  std::array<std::size_t, kMostRingSlots> last_in_slot_{};
  const UnitGradients* producing_ = nullptr;  // whose gradient came last
  std::int64_t room_ = 0;  // that units have left whose backward is over
};

}  // namespace lowtide::shard
