#include "shard/policy.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <optional>

namespace lowtide::shard {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

// A ring of its own pays from so many times the shared one on.
constexpr std::int64_t kWorthARing = 4;
// Latency outweighs bytes for fewer ranks than that.
constexpr std::int64_t kVeryManyRanks = 64;

constexpr std::int64_t kLargestUnitOverRing = 11;
// They have no ring of their own.
constexpr std::int64_t kLargeExperts = 640 * kMiB;
constexpr std::int64_t kMostRingOfExperts = 640 * kMiB;
constexpr std::int64_t kMostRingOfExpertsAmongMany = 1280 * kMiB;
// What leaves by one slot in the time of one rank's latency, see
// [Note: One slot].
constexpr std::int64_t kOneSlotPerRank = 5 * kMiB;
constexpr std::int64_t kSlotsForRows = 3;

constexpr std::int64_t kPackedInANode = std::int64_t{64} << 10;
constexpr std::int64_t kPackedPerRank = std::int64_t{24} << 10;
constexpr std::int64_t kMostPacked = 4 * kMiB;

constexpr std::int64_t kRanksOfANode = 8;
constexpr std::int64_t kFlopsPerByteOfMemory = 300;
constexpr std::int64_t kFlopsPerByteInANode = 3000;
constexpr std::int64_t kFlopsPerByteBetweenNodes = 20000;
constexpr std::int64_t kFlopsPerElementAndToken = 4;
constexpr double kFlopsPerNanosecond = 900'000;
constexpr double kSlowestLatencyNs = 200'000;

std::int64_t received_bytes(std::int64_t bytes, std::int64_t ranks) {
  return bytes / ranks * (ranks - 1);
}

// Bytes of a ring that holds one `part`-th of a unit's gradients, with a row
// for each chunk's result.
std::int64_t part_of(std::int64_t bytes, std::int64_t part,
                     std::int64_t ranks) {
  return bytes / part + bytes / part / ranks + kMiB;
}

// Of a ring that all units share.
std::int64_t most_ranks(c10::ArrayRef<RingUnit> units) {
  std::int64_t most = 1;
  for (const auto& unit : units) most = std::max(most, unit.ranks);
  return most;
}

template <typename Bytes>
std::int64_t most_bytes(c10::ArrayRef<RingUnit> units, Bytes bytes) {
  std::int64_t most = 0;
  for (const auto& unit : units) most = std::max(most, bytes(unit));
  return most;
}

// By two slots in eight chunks, among many ranks in four.
std::int64_t ring_of_experts(const RingUnit& unit) {
  if (!unit.experts) return 0;
  return unit.ranks < kManyRanks
             ? std::min(unit.wire_bytes / 4, kMostRingOfExperts)
             : std::min(part_of(unit.wire_bytes, 2, unit.ranks),
                        kMostRingOfExpertsAmongMany);
}

std::int64_t ring_of_largest(const RingUnit& unit) {
  return unit.ranks < kVeryManyRanks ? unit.wire_bytes / 4
                                     : part_of(unit.wire_bytes, 3, unit.ranks);
}

// Numbers of units whose gradients leave, but not of the outermost: these are
// small.
struct Ends {
  std::optional<std::int32_t> first;
  std::optional<std::int32_t> before_last;
  std::optional<std::int32_t> last;
};

const RingUnit& at(c10::ArrayRef<RingUnit> units, std::int32_t number) {
  return units[static_cast<std::size_t>(number)];
}

Ends ends_of(c10::ArrayRef<RingUnit> units, c10::ArrayRef<std::int32_t> order) {
  Ends ends;
  for (const auto number : order) {
    const auto& unit = at(units, number);
    if (unit.outermost || unit.wire_bytes == 0) {
      continue;
    }
    if (!ends.first) {
      ends.first = number;
    }
    ends.before_last = ends.last;
    ends.last = number;
  }
  return ends;
}

}  // namespace

std::int64_t packed_bytes(std::int64_t ranks) {
  return ranks <= kRanksOfANode ? kPackedInANode
                                : std::min(kPackedPerRank * ranks, kMostPacked);
}

std::int64_t ring_slots(c10::ArrayRef<RingUnit> units,
                        std::int64_t ring_bytes) {
  const auto ranks = most_ranks(units);
  return ranks < kVeryManyRanks || ring_bytes > ranks * kOneSlotPerRank
             ? kRingSlots
             : 1;
}

std::int64_t own_ring_slots(std::int64_t ranks) {
  return ranks < kManyRanks ? kMostRingSlots : kRingSlots;
}

std::int64_t slots_for_rows(std::int64_t slots) {
  return slots == 1 ? kSlotsForRows : slots;
}

bool cuts_evenly(std::int64_t ranks) { return ranks >= kVeryManyRanks; }

std::int64_t default_ring_budget(c10::ArrayRef<RingUnit> units) {
  const auto ranks = most_ranks(units);
  const auto least =
      ranks < kVeryManyRanks ? kDefaultRingBudget : kRingBudgetOfVeryMany;
  const auto largest =
      most_bytes(units, [](const auto& unit) { return unit.wire_bytes; });
  return std::max({least, ranks * kRingBudgetPerRank,
                   largest / kLargestUnitOverRing,
                   most_bytes(units, ring_of_experts)});
}

std::int64_t ring_bytes(c10::ArrayRef<RingUnit> units,
                        std::int64_t budget_bytes) {
  if (most_bytes(units, [](const auto& unit) { return unit.wire_bytes; }) <=
      kMiB) {
    return std::min(budget_bytes, kRingSlots * 2 * kMiB);
  }
  return std::min(budget_bytes,
                  std::max({2 * kMiB, most_bytes(units, ring_of_largest),
                            most_bytes(units, ring_of_experts)}));
}

std::int64_t ring_bytes_of(c10::ArrayRef<RingUnit> units,
                           c10::ArrayRef<std::int32_t> order,
                           std::int32_t number, std::int64_t budget_bytes,
                           std::int64_t ring_bytes) {
  const auto& unit = at(units, number);
  const bool large_experts = unit.experts && unit.wire_bytes > kLargeExperts;
  if (budget_bytes < kDefaultRingBudget || large_experts ||
      unit.wire_bytes <= kWorthARing * ring_bytes) {
    return ring_bytes;
  }
  const auto ends = ends_of(units, order);
  if (number == ends.first && !unit.streams_rows && unit.ranks >= kManyRanks) {
    return std::max(ring_bytes, std::min(unit.wire_bytes, unit.gathered_bytes));
  }
  if (number != ends.last || !ends.before_last) {
    return ring_bytes;
  }
  const bool latency = unit.ranks >= kManyRanks && unit.ranks < kVeryManyRanks;
  auto held = (latency ? 3 : 2) * at(units, *ends.before_last).gathered_bytes;
  for (const auto& other : units) {
    if (other.outermost) {
      held -= 2 * other.gathered_bytes;
    }
  }
  return std::max(ring_bytes, std::min(unit.wire_bytes, held));
}

// A slot is [ranks + 1, columns]: what is reduced and this rank's result.
std::int64_t ring_bytes_of_equal_chunks(std::int64_t ring_bytes,
                                        std::int64_t wire_bytes,
                                        std::int64_t ranks,
                                        std::int64_t row_bytes) {
  const auto slots = own_ring_slots(ranks);
  const auto of_a_rank = wire_bytes / ranks;
  const auto in_slot =
      std::max<std::int64_t>(1, ring_bytes / (slots * (ranks + 1)));
  const auto chunks = std::max(slots, (of_a_rank + in_slot / 2) / in_slot);
  return slots * (ranks + 1) * (of_a_rank / chunks + row_bytes);
}

double slow_link(std::int64_t gathered_bytes, std::int64_t ranks,
                 std::int64_t gather_ns) {
  if (ranks == 1 || gather_ns == 0) return 0;
  const auto received =
      static_cast<double>(received_bytes(gathered_bytes, ranks));
  const double bytes_per_ns = ranks <= kRanksOfANode ? 300 : 45;
  const auto measured = static_cast<double>(gather_ns);
  const bool slow = measured > 2 * received / bytes_per_ns + kSlowestLatencyNs;
  return slow ? received / measured * 1e9 : 0;
}

std::int64_t elements_every_token_uses(c10::ArrayRef<std::int64_t> sizes) {
  return sizes.size() == 3 ? 0 : c10::multiply_integers(sizes);
}

bool wire_outlasts_backward(std::int64_t gathered_bytes,
                            std::int64_t reduced_bytes, std::int64_t ranks,
                            std::int64_t elements, std::int64_t tokens,
                            double slow_link) {
  constexpr double kFlops = 450e12;
  constexpr double kFlopsPerElement = 6;
  const double bytes_per_second = slow_link > 0            ? slow_link
                                  : ranks <= kRanksOfANode ? 300e9
                                                           : 240e9;
  const auto received = static_cast<double>(
      received_bytes(gathered_bytes + reduced_bytes, ranks));
  const auto computed = kFlopsPerElement * static_cast<double>(elements) *
                        static_cast<double>(tokens);
  return ranks > 1 && tokens > 0 &&
         received / bytes_per_second > computed / kFlops;
}

std::int64_t elements_that_cover(std::int64_t bytes, std::int64_t ranks,
                                 std::int64_t tokens, std::int64_t gather_ns) {
  if (tokens <= 0) {
    return kNothingCovers;
  }
  const auto flops_per_element = kFlopsPerElementAndToken * tokens;
  if (slow_link(bytes, ranks, gather_ns) > 0) {
    return static_cast<std::int64_t>(static_cast<double>(gather_ns) /
                                     static_cast<double>(flops_per_element) *
                                     kFlopsPerNanosecond);
  }
  const auto rate = ranks == 1               ? kFlopsPerByteOfMemory
                    : ranks <= kRanksOfANode ? kFlopsPerByteInANode
                                             : kFlopsPerByteBetweenNodes;
  const auto received = ranks == 1 ? bytes : received_bytes(bytes, ranks);
  return received * rate / flops_per_element;
}

std::size_t gradients_before_gather(c10::ArrayRef<std::int64_t> elements,
                                    std::int64_t cover) {
  auto to_come =
      std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
  std::size_t before = 0;
  while (before < elements.size() && to_come - elements[before] >= cover) {
    to_come -= elements[before++];
  }
  return before;
}

}  // namespace lowtide::shard
