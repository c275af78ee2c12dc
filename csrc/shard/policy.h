// Every tuned number of sharding, with its source.  Pure functions of numbers
// that all ranks share: what they decide is the order of collectives, which
// must not depend on one rank's data.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace lowtide::shard {

// --- small tensors ----------------------------------------------------------

// A parameter of at most so many full bytes travels in the packed entry of its
// unit's gather, beside which every other one is an entry of its own.
//
// [Note: Entries of a gather]
// An entry makes a channel of NCCL's pass once more around the ring.  Between
// nodes of 8 GPUs that is (7 * 1.9 + 4) / 8 = 2.2 us a rank by NCCL's tuning
// model (LL128, what the phantom's clock charges), over 16 channels, so 0.135
// us; a packed one is read and written once more, at 3 TB/s.  Both are equal at
// 198 KiB a rank.  An eighth of that is packed: the copy takes memory from what
// computes, and its bytes are there twice while the gather is on its way.  At
// most 4 MiB: larger ones have bytes to hide their passes behind.  In a node,
// where 24 channels pass 7 * 1.9 us, the same is 101 KiB: 64 KiB are packed.
std::int64_t packed_bytes(std::int64_t ranks);

// [Note: Small gradients]
// Up to that many bytes a gradient costs its launch, not its bytes: it waits
// for those of its chunk, or without sync of its unit, and they are copied
// together.
inline constexpr std::size_t kSmallGradientBytes = std::size_t{64} << 10;

// --- the rings of gradient chunks -------------------------------------------

// [Note: Latency of a ring]
// A reduce-scatter pays its group's latency beside its bytes: on the phantom's
// clock, which has NCCL's tuning model, 0.025 ms of 8 H100s and about 0.2 ms of
// 64.  So gradients leave in few chunks: in two slots of 96 MiB, one written as
// one leaves, from 64 ranks on in one of 288 MiB, which Llama 8B's blocks
// leave by in three chunks of equal size: for a chunk that is computed
// meanwhile its source waits, in the dtype of compute, and that is less than a
// second slot.  docs/design/gradients.md has the table.
inline constexpr std::int64_t kDefaultRingBudget = std::int64_t{192} << 20;
inline constexpr std::int64_t kRingBudgetOfVeryMany = std::int64_t{288} << 20;
inline constexpr std::int64_t kRingBudgetPerRank = std::int64_t{9} << 17;
inline constexpr std::int64_t kManyRanks = 32;
// A ring of a unit of its own is so long that few ranks fit it into more holes
// of the allocator with four shorter slots.
inline constexpr std::int64_t kRingSlots = 2;
inline constexpr std::int64_t kMostRingSlots = 4;

// A unit as the rings see it.
struct RingUnit {
  std::int64_t ranks = 1;           // that reduce its gradients
  std::int64_t wire_bytes = 0;      // of its gradients; 0: none leave
  std::int64_t gathered_bytes = 0;  // of its parameters
  bool outermost = false;           // keeps all of it until the end
  bool streams_rows = false;        // see row_stream.h
  bool experts = false;             // most of its elements are stacked experts'
};

// Where a unit's gradients are many times the ring its chunks would be all
// latency, and the ring is a small part of what they take anyway.  Little
// computing hides those of experts, so latency counts: chunks of up to 320 MiB,
// among many ranks of 640, which take ten times the latency of 64 ranks.
std::int64_t default_ring_budget(c10::ArrayRef<RingUnit> units);

// The ring that units share: the budget, but no more than a quarter of the
// largest unit's gradients on the wire, among very many ranks a third (a longer
// ring would hold chunks that have landed), of experts what the default budget
// has of them.  Small models are not cut up: at least 2 MiB, and slots that
// hold whole units of up to 1 MiB.
std::int64_t ring_bytes(c10::ArrayRef<RingUnit> units,
                        std::int64_t budget_bytes);

// [Note: One slot]
// While a slot is on the wire nothing is written to it, so where the wire is
// what is waited for, it stands still for a copy of each chunk: three bytes
// through memory for two that leave, 1.8 TB/s of an H100.  A second slot of
// half the length costs a latency for each chunk instead: 3 us a rank.  Among
// many ranks one slot pays up to the bytes at which both are equal.  All units
// share it, those over few ranks too: a second one would be as long as what
// the others need.
std::int64_t ring_slots(c10::ArrayRef<RingUnit> units, std::int64_t ring_bytes);
// Of a ring that one unit has for itself.
std::int64_t own_ring_slots(std::int64_t ranks);
// A block of a parameter that comes in rows is there, and the next one, beside
// the slots: a part of the ring as long as this many slots.
std::int64_t slots_for_rows(std::int64_t slots);
// Among very many ranks a unit's chunks are of equal size, and a parameter is
// cut for that: a short chunk at the end would be all latency.
bool cuts_evenly(std::int64_t ranks);

// The bytes of the ring for gradients of units[number]: more than `ring_bytes`
// is a ring of its own.  `order`: numbers in the order in which the units'
// gradients left in the last backward.
//
// [Note: The end of backward]
// Nothing hides the reduction of the last unit, usually the embedding, so it
// leaves in few collectives.  Where the unit before it held its parameters, its
// gradients and its activations, a ring three times as long as those parameters
// fits, less what the outermost unit keeps until the end: parameters and
// gradients.  Among few ranks, where latency counts for little, and among very
// many twice as long is enough and fits between what other units left.  A
// budget below the default is kept.  Experts of more than 640 MiB leave by the
// ring of all: its chunks are long for their sake already, and slots of
// gigabytes would find no hole.
//
// [Note: The beginning of backward]
// The first unit to reduce, usually the head, has no unit before it to hide
// behind either, and the next one's backward waits for its gradients.  Among
// many ranks, where a chunk would be all latency, its ring is as long as its
// own parameters, which go when its backward is over.  How much room its output
// leaves must not decide that: ranks may differ in it, and a plan may not.
std::int64_t ring_bytes_of(c10::ArrayRef<RingUnit> units,
                           c10::ArrayRef<std::int32_t> order,
                           std::int32_t number, std::int64_t budget_bytes,
                           std::int64_t ring_bytes);

// About `ring_bytes`, such that a unit's `wire_bytes` leave in chunks of equal
// size; a short one at the end would be all latency.  Chunks end with a row of
// `row_bytes`, of one rank.
std::int64_t ring_bytes_of_equal_chunks(std::int64_t ring_bytes,
                                        std::int64_t wire_bytes,
                                        std::int64_t ranks,
                                        std::int64_t row_bytes);

// --- links that are slower than assumed
// ---------------------------------------

// The rules below assume fast links.  A measured gather of `gathered_bytes` (of
// all ranks) says otherwise where it takes twice as long and 0.2 ms more (what
// 64 ranks' latency takes) than (ranks - 1) / ranks of the bytes at 300 GB/s
// within a node of 8, at 45 GB/s between nodes.  What it received a second, in
// bytes; 0 where the rules' links hold, or `gather_ns` is 0: not known.  Below
// that threshold nothing depends on the clock, so that a plan's bytes do not.
double slow_link(std::int64_t gathered_bytes, std::int64_t ranks,
                 std::int64_t gather_ns);

// --- how long gradients wait for the wire ------------------------------------

// Elements of a parameter whose gradient takes 4 FLOPs for each element and
// token to compute.  Stacked matrices, of three dimensions, are experts: how
// many tokens each gets nobody knows, so they hide nothing.
std::int64_t elements_every_token_uses(c10::ArrayRef<std::int64_t> sizes);

// [Note: A wire that is slower than backward]
// Whether what a unit of `elements` gathers and reduces in a backward takes
// longer than it computes, `tokens` rows of output with their recomputation:
// 6 FLOPs an element and token at 450 TFLOP/s, half of an H100's rate, against
// (ranks - 1) / ranks of the bytes at 300 GB/s within a node of 8 and 240 GB/s
// between nodes, whose 8 links a ring has to itself, or what a slow link was
// measured to do.  Then whoever waits for
// gradients to leave stops computing although what is to come could hide them.
// `tokens` 0: not known.  A unit whose gradients have fewer than
// kLingeringBytes is spared the question: they leave in tens of microseconds.
inline constexpr std::int64_t kLingeringBytes = std::int64_t{8} << 20;
bool wire_outlasts_backward(std::int64_t gathered_bytes,
                            std::int64_t reduced_bytes, std::int64_t ranks,
                            std::int64_t elements, std::int64_t tokens,
                            double slow_link = 0);

// --- when the next unit's gather leaves -------------------------------------
//
// At the beginning of a unit's backward the gathered bytes would be there while
// the unit's values have been recomputed and its first gradients come: where
// the peak of a step is.  A backward that computes long enough does not need
// them yet, so the gather leaves as late as the rest of the computation still
// covers it.

// Elements of a unit's parameters whose gradients take as long to compute as
// gathering `bytes` (of all ranks) takes: 4 FLOPs for each element and token,
// its own gradient and its share of the input's, at the full bf16 rate, against
// (ranks - 1) / ranks of the bytes over one link.
//
//   900 TFLOP/s, 3 TB/s within a GPU (one rank): 300 FLOPs a byte
//   900 TFLOP/s, 300 GB/s between the 8 GPUs of a node: 3000 FLOPs a byte
//   900 TFLOP/s, 45 GB/s between nodes: 20000
//
// These are an H100's; kernels reach half of that rate, so the wire has twice
// the time it needs.  On a slow link (above) the time is `gather_ns`.
// `tokens`: rows of the unit's output; 0: not known, which nothing covers.
inline constexpr auto kNothingCovers = std::numeric_limits<std::int64_t>::max();
std::int64_t elements_that_cover(std::int64_t bytes, std::int64_t ranks,
                                 std::int64_t tokens,
                                 std::int64_t gather_ns = 0);

// How many gradients of `elements`, in the order they are expected, come before
// the gather: as many as leave `cover` elements to come when the one after them
// is there as well.  elements.size() at most: the gather leaves with the unit's
// last gradients.
std::size_t gradients_before_gather(c10::ArrayRef<std::int64_t> elements,
                                    std::int64_t cover);

}  // namespace lowtide::shard
