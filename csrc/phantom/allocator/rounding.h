// From the size of a request to the sizes of its block and its segment.
#pragma once

#include <cstddef>

#include "phantom/allocator/settings.h"

namespace lowtide::phantom {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kMinBlock = 512;
inline constexpr std::size_t kMaxSmall = kMiB;  // largest of the small pool
inline constexpr std::size_t kSmallSegment = 2 * kMiB;
inline constexpr std::size_t kMinOwnSegment = 10 * kMiB;
inline constexpr std::size_t kLargeRounding = 2 * kMiB;

// All in bytes.
std::size_t rounded_size(const AllocatorSettings& settings,
                         std::size_t request);
std::size_t segment_size(const AllocatorSettings& settings, std::size_t block);

std::size_t round_up(std::size_t value, std::size_t multiple);

}  // namespace lowtide::phantom
