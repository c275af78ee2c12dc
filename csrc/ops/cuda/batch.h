// The arguments of a kernel on lists of tensors: up to 48 transfers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/transfer.h"

namespace lowtide::ops::cuda {

// The arguments of a kernel take 4 KiB at most.
inline constexpr int kMostTransfers = 48;

struct Batch {
  Transfer transfers[kMostTransfers];
  std::int64_t first_tile[kMostTransfers + 1];
  int count;
};
static_assert(sizeof(Batch) <= 4000);

// Calls launch(batch, groups) for every kMostTransfers of them, with `most`
// groups of threads at most.
template <typename Launch>
void for_each_batch(const std::vector<Transfer>& transfers, std::int64_t most,
                    Launch launch) {
  for (std::size_t begin = 0; begin < transfers.size();
       begin += kMostTransfers) {
    Batch batch{};
    batch.count = static_cast<int>(
        std::min<std::size_t>(kMostTransfers, transfers.size() - begin));
    for (int i = 0; i < batch.count; ++i) {
      batch.transfers[i] = transfers[begin + static_cast<std::size_t>(i)];
      batch.first_tile[i + 1] =
          batch.first_tile[i] + num_tiles(batch.transfers[i]);
    }
    const auto tiles = batch.first_tile[batch.count];
    launch(batch, std::min(tiles, most));
  }
}

}  // namespace lowtide::ops::cuda
