#include "shard/row_stream.h"

#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/trace.h"
#include "ops/foreach.h"
#include "shard/parameters/gathering.h"
#include "shard/root.h"

namespace lowtide::shard {
namespace {

using device::Access;
using device::Stream;

Unit& require_rows(Unit& unit) {
  const auto& infos = unit.infos();
  if (infos.size() != 1 || infos[0].sizes.size() < 2 ||
      infos[0].shard_dim != 0) {
    throw InvalidArgument(base::error_text(
        base::concat("unit '", unit.name(), "'"),
        "one parameter with rows, to stream them",
        infos.size() == 1 && infos[0].shard_dim != 0
            ? base::concat("one that is split along dimension ",
                           infos[0].shard_dim)
            : base::concat(infos.size(), " parameters"),
        "Make the weight a unit of its own, without bias, or "
        "gather it whole."));
  }
  return unit;
}

}  // namespace

RowStream::RowStream(Unit& unit)
    : unit_(require_rows(unit)),
      slice_(unit.buffers().slice(0)),
      blocks_{Block(unit.memory()->runtime().device()),
              Block(unit.memory()->runtime().device())} {
  unit.gradients().stream_rows(0, slice_.inner);
}

void RowStream::read(RowReads reads, std::int64_t lookup_rows) {
  reads_ = std::max(reads_, reads);
  if (reads == RowReads::lookup) {
    lookup_rows_ = std::min(lookup_rows, slice_.padded_rows);
  }
}

bool RowStream::looks_up() const {
  return reads_ == RowReads::lookup && unit_.settings().reshard_after_forward &&
         (unit_.state() == UnitState::sharded ||
          unit_.state() == UnitState::reducing);
}

std::int64_t RowStream::gathered_bytes() const {
  const bool looks_up =
      reads_ == RowReads::lookup && unit_.settings().reshard_after_forward;
  if (!streams() || (reads_ == RowReads::lookup && !looks_up)) {
    return unit_.buffers().gathered_bytes();
  }
  std::int64_t numel = 0;
  if (looks_up) {
    numel = world_size() * slice_.inner *
            std::min(2 * lookup_rows_, slice_.padded_rows);
  } else {
    const auto blocks = unit_.gradients().num_blocks(0);
    for (std::int64_t k = 0; k < std::min<std::int64_t>(2, blocks); ++k) {
      numel += unit_.gradients().block_columns(0, k).numel;
    }
  }
  return numel * itemsize(info().compute_dtype);
}

bool streams_rows(const Unit& unit) {
  return unit.rows() != nullptr && unit.rows()->streams();
}

std::int64_t planned_gathered_bytes(const Unit& unit) {
  return unit.rows() != nullptr ? unit.rows()->gathered_bytes()
                                : unit.buffers().gathered_bytes();
}

std::int64_t planned_input_bytes(const Unit& unit) {
  const auto whole = unit.buffers().input_bytes();
  return whole > 0 && streams_rows(unit)
             ? unit.rows()->gathered_bytes() / unit.rows()->world_size()
             : whole;
}

RowStream::~RowStream() { abort(); }

void RowStream::abort() {
  for (auto& block : blocks_) {
    try {
      arrive(block);
    } catch (const std::exception& error) {
      LOG(WARNING) << error.what();
    }
    release(block);
  }
}

void RowStream::require_root() const {
  if (!unit_.root()) {
    throw Error(base::error_text(
        base::concat("unit '", unit_.name(), "'"),
        "a forward of the root module before its rows are read", "none yet",
        "Call the loss inside the root's forward, or after it."));
  }
}

std::int64_t RowStream::world_size() const {
  return unit_.groups().gather->size();
}

std::int64_t RowStream::num_blocks() const {
  return at::ceil_div(slice_.padded_rows, block_rows());
}

std::int64_t RowStream::rows_in(std::int64_t k) const {
  return std::min(block_rows(), slice_.padded_rows - k * block_rows());
}

void RowStream::begin_forward(bool recorded) {
  require_root();
  end();
  backward_ = false;
  rows_at_once_ = block_rows();
  unit_.root()->enter_rows(unit_, recorded);
}

void RowStream::begin_backward() {
  end();
  backward_ = true;
  rows_at_once_ = block_rows();
  unit_.begin_rows_backward();
}

void RowStream::begin_lookup() {
  require_root();
  end();
  backward_ = false;
  rows_at_once_ = lookup_rows_;
}

std::int64_t RowStream::fetched_rows(std::int64_t k) const {
  return std::min(rows_at_once_, slice_.padded_rows - k * rows_at_once_);
}

at::Tensor RowStream::fetch(std::int64_t k) {
  LOWTIDE_INVARIANT(k >= 0 && fetched_rows(k) > 0, "the block exists");
  const base::TraceRange trace("lowtide::fetch_rows", unit_.name());
  if (slot(k).number != k) {
    end();
    issue(k);
  }
  // The block before has been read by everything enqueued so far: its bytes
  // serve the next one, whose gather runs beside this block's kernels.
  release(slot(k + 1));
  if (fetched_rows(k + 1) > 0) {
    issue(k + 1);
  } else if (backward_) {
    unit_.prefetch_for_backward();
  } else {
    unit_.prefetch_for_forward();
  }
  auto& block = slot(k);
  arrive(block);
  auto sizes = info().sizes;
  sizes[0] = world_size() * fetched_rows(k);
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * sizes[d];
  }
  return block.gathered.view(info().compute_dtype, sizes, strides);
}

void RowStream::put(std::int64_t k, at::Tensor gradient) {
  const base::TraceRange trace("lowtide::put_rows", unit_.name());
  unit_.on_row_gradient(k, std::move(gradient));
}

void RowStream::end() {
  for (auto& block : blocks_) {
    arrive(block);
    release(block);
  }
}

void RowStream::issue(std::int64_t k) {
  auto& block = slot(k);
  auto& memory = *unit_.memory();
  if (unit_.root()) {
    unit_.root()->log().note({StepNote::What::rows, unit_.number(), k});
  }
  const auto row_bytes = slice_.inner * itemsize(info().compute_dtype);
  const auto bytes = fetched_rows(k) * row_bytes;
  block.gathered.own(memory.lease(memory::Category::gathered, unit_.name(),
                                  world_size() * bytes),
                     world_size() * bytes);
  if (info().storage_dtype != info().compute_dtype) {
    block.input.own(
        memory.lease(memory::Category::gather_input, unit_.name(), bytes),
        bytes);
  }
  block.pending = issue_gather(
      memory.runtime(),
      [&] {
        std::vector<at::Tensor> ins{cast_rows(block, k)};
        std::vector<at::Tensor> outs{
            block.gathered.view(at::kByte, {world_size() * bytes}, {1})};
        return unit_.groups().gather->all_gather(outs, ins, unit_.name());
      },
      [&] { release(block); });
  block.number = k;
}

// This rank's rows of block k in the compute dtype, as bytes.
at::Tensor RowStream::cast_rows(Block& block, std::int64_t k) {
  auto& runtime = unit_.memory()->runtime();
  const auto begin = k * rows_at_once_;
  const auto rows =
      unit_.buffers().padded_rows(0, begin, begin + fetched_rows(k));
  if (info().storage_dtype == info().compute_dtype) {
    const auto bytes = static_cast<std::int64_t>(rows.nbytes());
    return flat_view(rows.storage(), at::kByte,
                     rows.storage_offset() * itemsize(info().storage_dtype),
                     bytes);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto cast = block.input.view(info().compute_dtype, {rows.numel()}, {1});
  runtime.touches(Stream::gather, rows.const_data_ptr(), rows.nbytes(),
                  Access::read);
  runtime.touches(Stream::gather, cast.const_data_ptr(), cast.nbytes(),
                  Access::write);
  ops::foreach_copy(cast, rows);
  return block.input.view(at::kByte, {static_cast<std::int64_t>(cast.nbytes())},
                          {1});
}

void RowStream::arrive(Block& block) {
  if (const auto pending = std::move(block.pending)) {
    pending->wait();
  }
  block.input.unbind();
}

void RowStream::release(Block& block) {
  block.gathered.unbind();
  block.input.unbind();
  block.number = -1;
}

}  // namespace lowtide::shard
