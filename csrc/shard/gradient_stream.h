// Streams the gradients of all units under one root out to their owners
// through a bounded ring of chunks.
//
// Order.  Before a backward begins, every chunk of every unit that takes part
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
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/collectives.h"
#include "memory/device_memory.h"
#include "shard/gradient_ring.h"
#include "shard/policy.h"
#include "shard/step_log.h"
#include "shard/unit_gradients.h"

namespace lowtide::shard {

class GradientStream {
 public:
  // `log` outlives it.
  GradientStream(std::string root, std::shared_ptr<memory::DeviceMemory> memory,
                 StepLog& log);

  // A backward begins; `units`: those that take part with sync, in the order
  // their gradients are expected to complete, the same on every rank.
  void begin(const std::vector<UnitGradients*>& units);
  // A unit nobody expected, appended to the sequence.
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
    UnitGradients* unit = nullptr;
    std::int32_t lane = 0;
    std::int32_t chunk = -1;  // -1: the whole slab in one coalesced call
    std::int32_t pieces_missing = 0;  // not copied
    // Of these: small ones whose source is there.
    std::int32_t pieces_waiting = 0;
    std::size_t slot = 0;
    // The place of the chunk that had the slot before; kNone: nobody.
    std::size_t before = kNone;
    // Everything before this place has left once this one may be written.
    std::size_t opens_at = 0;
    at::Tensor input;
    at::Tensor output;
    std::vector<at::Tensor> slab_inputs;
    std::vector<at::Tensor> slab_outputs;
    std::unique_ptr<comm::Pending> pending;
    bool sent = false;
  };
  struct Gather {
    const UnitGradients* unit;
    std::size_t place;  // of the chunk it is ahead of
    std::function<void()> issue;
  };
  void add_entry(Entry entry);
  // How many of its unit's gradients an entry waits for, one more if it waits
  // for the unit to be sealed.
  std::size_t gradients_for(const Entry& entry,
                            const std::vector<std::size_t>& turns) const;
  bool may_leave(const Entry& entry) const;
  void issue_gathers(std::size_t place);
  const Chunk& chunk_of(const Entry& entry) const;
  bool in_window(std::size_t place) const;
  bool is_complete(const Entry& entry) const;
  static bool is_small(const UnitGradients::Parameter& parameter);
  static at::Tensor& source_of(UnitGradients::Parameter& parameter);
  void write_ready_pieces(std::size_t place, bool small_too);
  void write_pieces(std::size_t place, c10::ArrayRef<std::size_t> pieces);
  void open_slot(std::size_t place);
  bool prepare(UnitGradients& unit);
  void produces(const UnitGradients& unit);
  void produced(UnitGradients& unit, std::int32_t i);
  void pump();
  void complete(std::size_t place);
  void send(std::size_t place);
  void send_slab(std::size_t place);
  void land(std::size_t place);
  // Lands a unit whose last chunk has left and runs its `on_landed`.
  void show(UnitGradients& unit);
  // What has left before `place`.
  void land_until(std::size_t place);
  void touch(const at::Tensor& tensor, device::Access access);
  void land_sent();
  void land_in_place(std::int64_t keep_bytes);
  void require_here(const UnitGradients& unit, std::int32_t i) const;
  void land_row(Entry& entry, const std::vector<Piece>& pieces,
                const at::Tensor& row, const at::Tensor& flags);
  void land_slab(Entry& entry);
  // Starts the sums over replicas of units that have left but `leaving`.
  void start_sums(const UnitGradients* leaving);
  void finish_sum();
  std::vector<comm::Pending*> in_flight() const;
  void clear();

  std::string root_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  StepLog& log_;
  std::vector<Entry> entries_;
  std::vector<UnitGradients*> units_;
  std::vector<Gather> gathers_;
  // Units that have left and the place behind their last entry, and the sum
  // that is on its way.
  struct Left {
    UnitGradients* unit;
    std::size_t places;
  };
  struct Sum {
    UnitGradients* unit;
    std::vector<PartialGradients::Flat> flats;
    std::vector<std::unique_ptr<comm::Pending>> pending;  // null: no replicas
  };
  std::deque<Left> to_sum_;
  std::optional<Sum> sum_;
  std::size_t next_ = 0;    // the first entry that has not left
  std::size_t opened_ = 0;  // the first one that may not be written yet
  std::size_t landed_ = 0;  // the first one that has not landed
  std::size_t turn_ = 0;    // of the slots
  // Which place had each slot last.
  std::array<std::size_t, kMostRingSlots> last_in_slot_{};
  const UnitGradients* producing_ = nullptr;  // whose gradient came last
  std::int64_t room_ = 0;  // that units have left whose backward is over
  GradientRing ring_;
};

}  // namespace lowtide::shard
