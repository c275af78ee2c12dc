#include "shard/row_stream.h"

#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Logging.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/trace.h"
#include "ops/foreach.h"
#include "shard/parameters/gathering.h"

namespace lowtide::shard {

using device::Access;
using device::Stream;

RowStream::RowStream(UnitName unit, const UnitSettings& settings,
                     const std::shared_ptr<comm::Collectives>& ranks,
                     const UnitParameters& parameters, UnitGradients& gradients,
                     std::shared_ptr<memory::DeviceMemory> memory,
                     RowReceiver& receiver)
    : unit_(std::move(unit)),
      settings_(settings),
      ranks_(ranks),
      parameters_(parameters),
      gradients_(gradients),
      memory_(std::move(memory)),
      receiver_(receiver),
      blocks_{Block(memory_->runtime().device()),
              Block(memory_->runtime().device())} {}

void RowStream::require_rows() const {
  const auto& infos = parameters_.infos();
  if (infos.size() != 1 || infos[0].sizes.size() < 2 ||
      infos[0].shard_dim != 0) {
    throw InvalidArgument(base::error_text(
        base::concat("unit '", *unit_, "'"),
        "one parameter with rows, to stream them",
        infos.size() == 1 && infos[0].shard_dim != 0
            ? base::concat("one that is split along dimension ",
                           infos[0].shard_dim)
            : base::concat(infos.size(), " parameters"),
        "Make the weight a unit of its own, without bias, or "
        "gather it whole."));
  }
}

RowStream& RowStream::read(RowReads reads, std::int64_t lookup_rows) {
  if (reads_ == RowReads::none) {
    require_rows();
    gradients_.stream_rows(0, slice().inner);
    receiver_.on_rows_chosen();
  }
  reads_ = std::max(reads_, reads);
  if (reads == RowReads::lookup) {
    lookup_rows_ = std::min(lookup_rows, slice().padded_rows);
  }
  return *this;
}

bool RowStream::is_table() const {
  return reads_ == RowReads::lookup && settings_.reshard_after_forward;
}

bool RowStream::looks_up() const { return is_table() && !parameters_.here(); }

std::int64_t RowStream::gathered_bytes() const {
  std::int64_t numel = 0;
  if (is_table()) {
    numel = world_size() * slice().inner *
            std::min(2 * lookup_rows_, slice().padded_rows);
  } else if (reads_ == RowReads::blocks) {
    const auto blocks = gradients_.num_blocks(0);
    for (std::int64_t k = 0; k < std::min<std::int64_t>(2, blocks); ++k) {
      numel += gradients_.block_columns(0, k).numel;
    }
  } else {
    return buffers().gathered_bytes();
  }
  return numel * itemsize(info().compute_dtype);
}

std::int64_t RowStream::input_bytes() const {
  if (!streams()) {
    return buffers().input_bytes();
  }
  const auto numel =
      gathered_bytes() / world_size() / itemsize(info().compute_dtype);
  const bool staged = buffers().host() != nullptr && !stages_in_gathered();
  return numel * ((info().casts() ? itemsize(info().compute_dtype) : 0) +
                  (staged ? itemsize(info().storage_dtype) : 0));
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

std::int64_t RowStream::num_blocks() const {
  return at::ceil_div(padded_rows(), block_rows());
}

std::int64_t RowStream::rows_in(std::int64_t k) const {
  return std::min(block_rows(), padded_rows() - k * block_rows());
}

void RowStream::begin(RowPass pass) {
  end();
  pass_ = pass;
  rows_at_once_ = pass == RowPass::lookup ? lookup_rows_ : block_rows();
  receiver_.on_rows_begin(pass);
}

std::int64_t RowStream::fetched_rows(std::int64_t k) const {
  return std::min(rows_at_once_, padded_rows() - k * rows_at_once_);
}

at::Tensor RowStream::fetch(std::int64_t k) {
  LOWTIDE_INVARIANT(k >= 0 && fetched_rows(k) > 0, "the block exists");
  const base::TraceRange trace("lowtide::fetch_rows", *unit_);
  if (slot(k).number != k) {
    end();
    issue(k);
  }
  // The block before has been read by everything enqueued so far: its bytes
  // serve the next one, whose gather runs beside this block's kernels.
  release(slot(k + 1));
  if (fetched_rows(k + 1) > 0) {
    issue(k + 1);
  } else {
    receiver_.on_last_rows(pass_);
  }
  auto& block = slot(k);
  arrive(block);
  auto sizes = info().sizes;
  sizes[0] = world_size() * fetched_rows(k);
  return block.gathered.view(info().compute_dtype, sizes,
                             c10::contiguous_strides(sizes));
}

void RowStream::put(std::int64_t k, at::Tensor gradient) {
  const base::TraceRange trace("lowtide::put_rows", *unit_);
  receiver_.on_row_gradient(k, std::move(gradient));
}

void RowStream::end() {
  bool any = false;
  for (auto& block : blocks_) {
    any = any || block.number != -1;
    arrive(block);
    release(block);
  }
  if (any) wait_for_host_copies();
}

// A loss may read rows behind the root's forward; where a backward is over the
// root waits.
void RowStream::wait_for_host_copies() {
  const bool after_forward =
      pass_ == RowPass::forward || pass_ == RowPass::recorded;
  if (after_forward && buffers().host() != nullptr) {
    buffers().host()->wait();
  }
}

void RowStream::issue(std::int64_t k) {
  auto& block = slot(k);
  auto& memory = *memory_;
  receiver_.on_rows_gather(k);
  const auto row_bytes = slice().inner * itemsize(info().compute_dtype);
  const auto numel = fetched_rows(k) * slice().inner;
  const auto bytes = fetched_rows(k) * row_bytes;
  block.gathered.own(
      memory.lease(memory::Category::gathered, *unit_, world_size() * bytes),
      world_size() * bytes);
  if (info().storage_dtype != info().compute_dtype) {
    block.input.own(memory.lease(memory::Category::gather_input, *unit_, bytes),
                    bytes);
  }
  if (buffers().host() != nullptr) {
    const auto staged = numel * itemsize(info().storage_dtype);
    if (stages_in_gathered()) {
      block.staged.bind(block.gathered.mutable_data(), staged);
    } else {
      block.staged.own(
          memory.lease(memory::Category::gather_input, *unit_, staged), staged);
    }
  }
  block.pending = issue_gather(
      memory.runtime(),
      [&] {
        std::vector<at::Tensor> ins{cast_rows(block, stage_rows(block, k))};
        std::vector<at::Tensor> outs{
            block.gathered.view(at::kByte, {world_size() * bytes}, {1})};
        return ranks_->all_gather(outs, ins, *unit_);
      },
      [&] { release(block); });
  block.number = k;
}

// As ParameterBuffers does: they are cast before the gather writes there.
bool RowStream::stages_in_gathered() const {
  return info().casts() && itemsize(info().storage_dtype) <=
                               world_size() * itemsize(info().compute_dtype);
}

// This rank's rows of block k, on the device.
at::Tensor RowStream::stage_rows(Block& block, std::int64_t k) {
  const auto begin = k * rows_at_once_;
  auto rows = buffers().padded_rows(0, begin, begin + fetched_rows(k));
  if (buffers().host() == nullptr) {
    return rows;
  }
  memory_->runtime().wait(
      Stream::gather, buffers().host()->to_device(
                          block.staged.mutable_data(), rows.const_data_ptr(),
                          static_cast<std::int64_t>(rows.nbytes())));
  return block.staged.view(info().storage_dtype, {rows.numel()}, {1});
}

// `rows` in the compute dtype, as bytes.
at::Tensor RowStream::cast_rows(Block& block, const at::Tensor& rows) {
  auto& runtime = memory_->runtime();
  if (info().storage_dtype == info().compute_dtype) {
    return base::bytes_of(rows);
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
  block.staged.unbind();
  block.input.unbind();
}

void RowStream::release(Block& block) {
  block.gathered.unbind();
  block.staged.unbind();
  block.input.unbind();
  block.number = -1;
}

}  // namespace lowtide::shard
