#include "phantom/cuda_kernels/cub_storage.h"

#include <ATen/ceil_div.h>

namespace lowtide::phantom {
namespace {

std::size_t tiles(std::int64_t count, std::int64_t per_tile) {
  return static_cast<std::size_t>(at::ceil_div(count, per_tile));
}

// CUB places its parts at multiples of this, and aligns the first itself.
constexpr std::size_t kAlignment = 256;

std::size_t aligned(std::size_t bytes) {
  return at::round_up(bytes, kAlignment);
}

// One state of 16 bytes for each tile and each lane of a warp, and one more
// part that is empty.
std::size_t scan_bytes(std::int64_t count, std::int64_t per_tile) {
  constexpr std::size_t kWarp = 32, kState = 16;
  return aligned((tiles(count, per_tile) + kWarp) * kState) + kAlignment +
         kAlignment - 1;
}

}  // namespace

std::size_t cub_sort_pairs_bytes(std::int64_t count, int num_bits) {
  constexpr std::int64_t kSingleTile = 2304, kTile = 4608;
  if (count <= kSingleTile) return 1;
  constexpr std::size_t kBins = 256, kRadixBits = 8;
  const auto passes =
      at::ceil_div(static_cast<std::size_t>(num_bits), kRadixBits);
  const std::size_t buffers = 2 * aligned(static_cast<std::size_t>(count) * 8);
  const std::size_t histograms = passes * kBins * 8;
  const std::size_t look_back = tiles(count, kTile) * kBins * 4;
  return buffers + histograms + look_back + kAlignment + kAlignment - 1;
}

std::size_t cub_exclusive_sum_bytes(std::int64_t count) {
  return scan_bytes(count, 896);
}

std::size_t cub_unique_by_key_bytes(std::int64_t count) {
  return scan_bytes(count, 4608);
}

std::size_t cub_scan_by_key_bytes(std::int64_t count) {
  constexpr std::int64_t kTile = 2432;
  const std::size_t keys_before_tiles = tiles(count, kTile) * 8;
  return scan_bytes(count, kTile) - kAlignment + aligned(keys_before_tiles);
}

}  // namespace lowtide::phantom
