#include "phantom/allocator/rounding.h"

#include <algorithm>
#include <bit>

namespace lowtide::phantom {
namespace {

std::size_t divisions_for(const AllocatorSettings& settings,
                          std::size_t request) {
  const auto& divisions = settings.roundup_power2_divisions;
  const std::size_t interval =
      std::bit_width(std::max(request, kMiB)) - std::bit_width(kMiB);
  return divisions[std::min(interval, divisions.size() - 1)];
}

// The next of the `divisions` equal steps between two powers of two.
std::size_t next_division(std::size_t request, std::size_t divisions) {
  if (std::has_single_bit(request)) return request;
  const std::size_t step = std::bit_floor(request) / divisions;
  return step == 0 ? std::bit_ceil(request) : round_up(request, step);
}

}  // namespace

std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::size_t rounded_size(const AllocatorSettings& settings,
                         std::size_t request) {
  if (request < kMinBlock) return kMinBlock;
  const std::size_t divisions = divisions_for(settings, request);
  if (divisions > 1 && request > kMinBlock * divisions) {
    return next_division(request, divisions);
  }
  return round_up(request, kMinBlock);
}

std::size_t segment_size(const AllocatorSettings& settings, std::size_t block) {
  if (block <= kMaxSmall) return kSmallSegment;
  if (block < kMinOwnSegment) return settings.large_segment;
  return round_up(block, kLargeRounding);
}

}  // namespace lowtide::phantom
