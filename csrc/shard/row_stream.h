// A large parameter that is never gathered whole: a loss over the vocabulary
// reads the head's rows block by block, and gives their gradient back block by
// block; an embedding looks its rows up block by block.
//
// Block k holds rows [k * block_rows, (k + 1) * block_rows) of *every* rank's
// shard, in rank order: [N * rows, ...].  It is as large as a chunk of the
// gradient ring, so the gradient of a block fills one and leaves at once.
//
//   vocabulary   rank 0: 0 1 2 3 4   rank 1: 5 6 7 8 9      N = 2
//   block 0      0 1 5 6             block 1: 2 3 7 8       block_rows = 2
//   block 2      4 9
//
// Streams: as everywhere, bytes come from the compute stream's pool and the
// gather of block k + 1 is issued before the kernels that read block k.  Two
// blocks live at once, whatever the size of the parameter.
//
// Threads: one at a time, without the GIL around `fetch` and `put`.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>

#include "comm/collectives.h"
#include "shard/storage.h"
#include "shard/unit.h"

namespace lowtide::shard {

// What of a parameter comes in blocks of rows; each is more than the one
// before.
enum class RowReads : std::uint8_t {
  // Only its gradient: the parameter is gathered as ever.
  gradient,
  // The parameter as well, and nobody gathers it ahead as a whole.
  blocks,
  // The unit's module is an embedding whose forward reads the rows by itself,
  // `lookup_rows` of every rank's shard at a time; nobody gathers the table as
  // long as `reshard_after_forward` holds.
  lookup,
};

class RowStream {
 public:
  // The unit owns it (Unit::in_rows).
  explicit RowStream(Unit& unit);
  // Waits for a gather that is under way.
  ~RowStream();
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;

  std::int64_t world_size() const;
  std::int64_t num_rows() const { return slice_.rows; }
  // Of a rank's shard, padded: rank r's row j is row r * padded_rows + j of the
  // parameter, and padding from num_rows on.
  std::int64_t padded_rows() const { return slice_.padded_rows; }
  // What several uses give in this backward is summed in the reduce dtype, as
  // [Note: The dtype of a gradient] has it; before its first block.
  bool sums_as_reduced() const {
    const auto& gradients = unit_.gradients();
    return info().gradient_as_computed && !gradients.sync() &&
           !gradients.touched(0);
  }
  // As planned; changes between steps only, with the gradient budget.
  std::int64_t block_rows() const {
    return unit_.gradients().parameter(0).rows.at_once;
  }
  std::int64_t num_blocks() const;
  // How many rows of every rank block k has.
  std::int64_t rows_in(std::int64_t k) const;
  // The same of the blocks of a lookup, which are larger: no gradient of theirs
  // is to fit a chunk.
  std::int64_t lookup_rows() const { return lookup_rows_; }

  // Before a forward; the same on every rank.  What was asked for before stays.
  void read(RowReads reads, std::int64_t lookup_rows);
  // Nobody gathers the parameter ahead as a whole.
  bool streams() const { return reads_ != RowReads::gradient; }
  // Whether the forward that is running, or would run now, looks rows up.
  bool looks_up() const;
  // Of the blocks that live at once.
  std::int64_t gathered_bytes() const;

  // A pass over all blocks begins: of a forward, which autograd records or not,
  // or of the backward that delivers gradients.  Throws lowtide::Error before
  // the root module's first forward; a forward's also on another stream than
  // the root module's last forward began on.
  void begin_forward(bool recorded);
  void begin_backward();
  // A pass over all rows in blocks of `lookup_rows`, inside the forward of the
  // unit's module, which is what autograd records.
  void begin_lookup();

  // Block k of the pass in the compute dtype, [N * rows_in(k), ...]; valid, and
  // its bytes there, until the next fetch or `end`.  Blocks are fetched in
  // order.
  at::Tensor fetch(std::int64_t k);
  // The gradient of block k, in any dtype; it must not be written afterwards.
  // Nothing happens if the parameter is frozen.
  void put(std::int64_t k, at::Tensor gradient);
  void end();
  // The same after an error: ignores what a collective throws.
  void abort();

 private:
  struct Block {
    explicit Block(c10::Device device) : gathered(device), input(device) {}
    RepointedStorage gathered;
    RepointedStorage input;
    std::unique_ptr<comm::Pending> pending;
    std::int64_t number = -1;
  };

  Block& slot(std::int64_t k) {
    return blocks_[static_cast<std::size_t>(k % 2)];
  }
  const ParameterInfo& info() const { return unit_.infos()[0]; }
  void require_root() const;
  std::int64_t fetched_rows(std::int64_t k) const;
  void issue(std::int64_t k);
  at::Tensor cast_rows(Block& block, std::int64_t k);
  static void arrive(Block& block);
  static void release(Block& block);

  Unit& unit_;
  memory::ParameterSlice slice_;
  RowReads reads_ = RowReads::gradient;
  std::int64_t lookup_rows_ = 0;
  std::int64_t rows_at_once_ = 0;  // of this pass
  bool backward_ = false;
  std::array<Block, 2> blocks_;
};

// Nobody gathers the unit's parameters ahead as a whole.
bool streams_rows(const Unit& unit);
// Bytes of the two buffers that the unit's gathers need at once.
std::int64_t planned_gathered_bytes(const Unit& unit);
std::int64_t planned_input_bytes(const Unit& unit);

}  // namespace lowtide::shard
