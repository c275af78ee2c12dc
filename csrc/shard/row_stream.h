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
#include "memory/device_memory.h"
#include "shard/gradients/unit_gradients.h"
#include "shard/parameters/unit_parameters.h"
#include "shard/storage.h"
#include "shard/unit_settings.h"

namespace lowtide::shard {

// What of a parameter comes in blocks of rows; each is more than the one
// before.
enum class RowReads : std::uint8_t {
  none,
  // Only its gradient: the parameter is gathered as ever.
  gradient,
  // The parameter as well, and nobody gathers it ahead as a whole.
  blocks,
  // The unit's module is an embedding whose forward reads the rows by itself,
  // `lookup_rows` of every rank's shard at a time; nobody gathers the table as
  // long as `reshard_after_forward` holds.
  lookup,
};

// What a pass over the rows is for: a lookup, a forward that autograd records
// or not, the backward that delivers gradients.
enum class RowPass : std::uint8_t { lookup, forward, recorded, backward };

// What a unit learns from its rows.
class RowReceiver {
 public:
  virtual ~RowReceiver() = default;
  // The gradient comes in blocks from the next plan on, which is due now.
  virtual void on_rows_chosen() = 0;
  virtual void on_rows_begin(RowPass pass) = 0;
  // The gather of block k is issued now; that of the pass's last block was.
  virtual void on_rows_gather(std::int64_t k) = 0;
  virtual void on_last_rows(RowPass pass) = 0;
  virtual void on_row_gradient(std::int64_t k, at::Tensor gradient) = 0;
};

class RowStream {
 public:
  // `ranks`: who has the shards; all of it outlives the stream.
  RowStream(UnitName unit, const UnitSettings& settings,
            const std::shared_ptr<comm::Collectives>& ranks,
            const UnitParameters& parameters, UnitGradients& gradients,
            std::shared_ptr<memory::DeviceMemory> memory,
            RowReceiver& receiver);
  // Waits for a gather that is under way.
  ~RowStream();
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;

  std::int64_t world_size() const { return buffers().layout().world_size(); }
  std::int64_t num_rows() const { return slice().rows; }
  // Of a rank's shard, padded: rank r's row j is row r * padded_rows + j of the
  // parameter, and padding from num_rows on.
  std::int64_t padded_rows() const { return slice().padded_rows; }
  // What several uses give in this backward is summed in the reduce dtype, as
  // [Note: The dtype of a gradient] has it; before its first block.
  bool sums_as_reduced() const {
    return info().gradient_as_computed && !gradients_.sync() &&
           !gradients_.touched(0);
  }
  // As planned; changes between steps only, with the gradient budget.
  std::int64_t block_rows() const {
    return gradients_.parameter(0).rows.at_once;
  }
  std::int64_t num_blocks() const;
  // How many rows of every rank block k has.
  std::int64_t rows_in(std::int64_t k) const;
  // The same of the blocks of a lookup, which are larger: no gradient of theirs
  // is to fit a chunk.
  std::int64_t lookup_rows() const { return lookup_rows_; }

  // Before a forward; the same on every rank.  What was asked for before stays.
  // Throws lowtide::InvalidArgument unless the unit has one parameter, which is
  // split along its rows.
  RowStream& read(RowReads reads, std::int64_t lookup_rows = 0);
  // Nobody gathers the unit's parameters ahead as a whole.
  bool streams() const { return reads_ > RowReads::gradient; }
  bool delivers_gradients() const { return reads_ != RowReads::none; }
  // Whether the forward that is running, or would run now, looks rows up.
  bool looks_up() const;
  // Bytes of the two buffers that the unit's gathers need at once: of all
  // parameters, or of the blocks that live together.
  std::int64_t gathered_bytes() const;
  std::int64_t input_bytes() const;

  // A pass over all blocks begins.  Throws lowtide::Error before the root
  // module's first forward; a forward's also on another stream than the root
  // module's last forward began on.  A lookup has blocks of `lookup_rows` and
  // is inside the forward of the unit's module, which is what autograd records.
  void begin(RowPass pass);

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
    explicit Block(c10::Device device)
        : gathered(device), staged(device), input(device) {}
    RepointedStorage gathered;
    RepointedStorage staged;  // of rows on the host: their copy
    RepointedStorage input;
    std::unique_ptr<comm::Pending> pending;
    std::int64_t number = -1;
  };

  Block& slot(std::int64_t k) {
    return blocks_[static_cast<std::size_t>(k % 2)];
  }
  const ParameterBuffers& buffers() const { return parameters_.buffers(); }
  const ParameterInfo& info() const { return parameters_.infos()[0]; }
  const memory::ParameterSlice& slice() const { return buffers().slice(0); }
  bool is_table() const;
  void require_rows() const;
  std::int64_t fetched_rows(std::int64_t k) const;
  void issue(std::int64_t k);
  bool stages_in_gathered() const;
  at::Tensor stage_rows(Block& block, std::int64_t k);
  at::Tensor cast_rows(Block& block, const at::Tensor& rows);
  void wait_for_host_copies();
  static void arrive(Block& block);
  static void release(Block& block);

  UnitName unit_;
  const UnitSettings& settings_;
  const std::shared_ptr<comm::Collectives>& ranks_;
  const UnitParameters& parameters_;
  UnitGradients& gradients_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  RowReceiver& receiver_;
  RowReads reads_ = RowReads::none;
  std::int64_t lookup_rows_ = 0;
  std::int64_t rows_at_once_ = 0;  // of this pass
  RowPass pass_ = RowPass::forward;
  std::array<Block, 2> blocks_;
};

}  // namespace lowtide::shard
