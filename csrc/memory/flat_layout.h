// Where everything of one sharded unit lies.  Pure arithmetic.
//
// Dim 0 of every parameter is split over `world_size` ranks as torch.chunk and
// DTensor's Shard(0) do: ceil(rows / N) rows a rank, the last ranks get fewer
// or none.  For the all-gather to write straight into place every rank's piece
// is padded to that many rows, so the unit needs three buffers:
//
//   gathered  compute dtype; a parameter's N padded pieces in rank order; its
//             first `rows` rows are the parameter, the rest is padding
//   shard     storage dtype; this rank's padded piece of every parameter
//   input     compute dtype; the same pieces cast, what the all-gather reads
//
// [Note: Alignment] A parameter starts at a multiple of `alignment` bytes in
// each of them: kernels read aligned vectors, and slices of different dtypes
// never share one.  In shard and input it takes a multiple of `alignment`
// *elements*, so that neighbours of one dtype lie equally far apart in both
// and one copy casts them all.
//
// [Note: Packed parameters] A collective for a few KiB costs as much as one for
// a MiB.  Parameters that may be packed (the caller says which: small ones)
// come first in shard and input, so that one rank's pieces of them are one
// contiguous row, and travel as one all-gather of [N, packed_row_bytes]; each
// is then copied from its columns of that matrix into its place in gathered.
// What lies between them travels too, so they are only `kPackedMultiple`
// elements apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lowtide::memory {

inline constexpr std::int64_t kAlignment = 256;      // bytes
inline constexpr std::int64_t kPackedMultiple = 16;  // elements

struct ParameterShape {
  std::string name;
  std::vector<std::int64_t> sizes;    // global, at least one dimension
  std::int64_t storage_itemsize = 4;  // bytes; sharded master
  std::int64_t compute_itemsize = 4;  // bytes; gathered
  bool may_pack = false;              // see [Note: Packed parameters]
  // Unless it is packed it has a place of its own instead of one in gathered.
  bool apart = false;
};

struct ParameterSlice {
  std::int64_t rows = 0;         // sizes[0]
  std::int64_t inner = 1;        // elements in a row
  std::int64_t padded_rows = 0;  // of one rank: ceil(rows / N)
  std::int64_t shard_numel = 0;  // of one rank, padded: padded_rows * inner

  // Offset and extent in bytes; the extent is not padded to the alignment.
  std::int64_t gathered_offset = 0;
  std::int64_t gathered_bytes = 0;  // N * shard_numel * compute_itemsize
  std::int64_t shard_offset = 0;
  std::int64_t shard_bytes = 0;  // shard_numel * storage_itemsize
  std::int64_t input_offset = 0;
  std::int64_t input_bytes = 0;  // shard_numel * compute_itemsize
  // Travels in the packed row, at input_offset.
  bool packed = false;
  // Its gathered_bytes are not in gathered.  Never with one rank.
  bool apart = false;

  std::int64_t numel() const { return rows * inner; }
  // Rows of the parameter, without padding, that `rank` holds.
  std::int64_t local_rows(std::int64_t rank) const;
  std::int64_t local_numel(std::int64_t rank) const {
    return local_rows(rank) * inner;
  }
};

class FlatLayout {
 public:
  // Throws lowtide::InvalidArgument, naming the parameter, for a scalar and
  // for sizes whose bytes do not fit into 63 bits.
  FlatLayout(std::int64_t world_size,
             const std::vector<ParameterShape>& parameters,
             std::int64_t alignment = kAlignment);

  std::int64_t world_size() const { return world_size_; }
  std::size_t size() const { return slices_.size(); }
  const ParameterSlice& operator[](std::size_t i) const { return slices_[i]; }

  // Bytes of the three buffers: the sums of the aligned extents.
  std::int64_t gathered_bytes() const { return gathered_bytes_; }
  std::int64_t shard_bytes() const { return shard_bytes_; }
  std::int64_t input_bytes() const { return input_bytes_; }

  // All parameters as they follow each other in the buffers.
  const std::vector<std::size_t>& order() const { return order_; }
  // Of one rank; 0 if nothing is packed: with one rank, or fewer than two
  // parameters that may be.
  std::int64_t packed_row_bytes() const { return packed_row_bytes_; }

 private:
  std::int64_t world_size_;
  std::vector<ParameterSlice> slices_;
  std::vector<std::size_t> order_;
  std::int64_t packed_row_bytes_ = 0;
  std::int64_t gathered_bytes_ = 0;
  std::int64_t shard_bytes_ = 0;
  std::int64_t input_bytes_ = 0;
};

}  // namespace lowtide::memory
