// Which reduce-scatter carries which gradient: pure arithmetic, fixed before
// the first backward and the same on every rank.
//
// A unit's gradients leave in chunks.  A chunk is a matrix [N, columns], one
// row per rank: row r holds what rank r will own.  Every parameter contributes
// `shard_numel` columns (its padded rows per rank times the inner size), cut
// into pieces.  The last chunk of a unit also carries one flag column per
// trainable parameter: non-zero where this rank produced a gradient, so that
// after the sum every rank knows which parameters *some* rank used.
//
// [Note: Columns in multiples of 128]
// A chunk's column count is a multiple of 128.  gloo's ring reduce-scatter then
// adds the ranks' rows in one fixed order for every element, whatever the
// chunking, which makes the result independent of the budget.  On NCCL it
// keeps every row 512-byte aligned.
#pragma once

#include <cstdint>
#include <vector>

namespace lowtide::shard {

inline constexpr std::int64_t kChunkColumnMultiple = 128;
// Pieces start at multiples of this, so fp32 rows of pieces are 256 B apart
// from the next parameter's.
inline constexpr std::int64_t kPieceColumnMultiple = 64;

// What would leave as a piece of a few packets is not cut for the sake of even
// chunks.
inline constexpr std::int64_t kUncutColumns = 1024;

// Columns [begin, end) of parameter `parameter`'s shard stand at
// [column, column + end - begin) of the chunk.
struct Piece {
  std::int32_t parameter;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t column;
  std::int64_t size() const { return end - begin; }
};

struct Chunk {
  std::vector<Piece> pieces;
  std::int64_t columns = 0;        // multiple of kChunkColumnMultiple
  std::int64_t flags_column = -1;  // first flag column, -1 if none here
};

struct UnitPlan {
  std::vector<Chunk> chunks;        // in the order they leave
  std::int64_t num_parameters = 0;  // flag columns: one per parameter id

  std::int64_t max_columns() const;
};

// `shard_numel[p]`: columns of parameter p, 0 allowed.
// `order`: the trainable parameters in the order their gradients are expected
// to complete; parameters not listed get no columns.
// `max_columns`: upper bound for a chunk; rounded down to the multiple, at
// least one multiple.
//
// A parameter that fits in one chunk is never cut; a larger one is cut into
// strips.  `evenly`: as few chunks as may be, about equally wide, for which
// what fits may be cut, up to kUncutColumns only where there is no room.
// `strips[p]` > 0 fixes the strips of parameter p: that many columns each, each
// at the start of a chunk, whatever `max_columns` says (its gradient comes in
// rows, see row_stream.h).  Flags may make the last chunk exceed `max_columns`
// by num_parameters columns, rounded to the multiple.
UnitPlan plan_unit(const std::vector<std::int64_t>& shard_numel,
                   const std::vector<std::int32_t>& order,
                   std::int64_t max_columns,
                   const std::vector<std::int64_t>& strips = {},
                   bool evenly = false);

// The largest `max_columns` for which `num_slots` chunks of [world_size + 1,
// columns] elements of `itemsize` bytes fit in `budget_bytes` (the extra row
// receives the result); at least one multiple.
std::int64_t columns_for_budget(std::int64_t budget_bytes,
                                std::int64_t num_slots, std::int64_t world_size,
                                std::int64_t itemsize);

}  // namespace lowtide::shard
