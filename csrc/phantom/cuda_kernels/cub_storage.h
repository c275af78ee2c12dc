// Bytes of temporary storage that CUB's device-wide algorithms ask for, with
// the tile sizes it chooses on an H100 for 8-byte values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lowtide::phantom {

// Keys and values of 8 bytes, sorted by the keys' lowest `num_bits`.
std::size_t cub_sort_pairs_bytes(std::int64_t count, int num_bits);
std::size_t cub_exclusive_sum_bytes(std::int64_t count);
std::size_t cub_unique_by_key_bytes(std::int64_t count);
std::size_t cub_scan_by_key_bytes(std::int64_t count);

}  // namespace lowtide::phantom
