// The part of ParameterBuffers for what forward leaves to gather backward's
// parameters from, over a smaller group than the shards'.
#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "base/check.h"
#include "shard/parameter_buffers.h"

namespace lowtide::shard {

template <typename Visit>
std::int64_t ParameterBuffers::for_each_part(std::int64_t parts,
                                             Visit visit) const {
  std::int64_t kept = 0;
  const auto add = [&](std::int64_t offset, std::int64_t gathered) {
    const auto bytes = gathered / parts;
    if (bytes > 0) {
      visit(offset, kept, bytes);
    }
    kept += at::round_up(bytes, memory::kAlignment);
  };
  for (std::size_t i = 0; i < layout_.size(); ++i) {
    add(layout_[i].gathered_offset, layout_[i].gathered_bytes);
  }
  for (const auto& extent : extended_.extents()) {
    LOWTIDE_INVARIANT(!extent.passes, "what parts are kept of stays");
    add(layout_.gathered_bytes() + extent.offset, extent.bytes);
  }
  return kept;
}

void ParameterBuffers::keep_part(std::int64_t index, std::int64_t parts) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  require_no_array();
  kept_bytes_ = for_each_part(parts, [](auto, auto, auto) {});
  if (kept_bytes_ > 0) {
    kept_.own(memory_->lease(memory::Category::gathered, *unit_, kept_bytes_),
              kept_bytes_);
    auto& runtime = memory_->runtime();
    for_each_part(parts, [&](auto from, auto to, auto bytes) {
      auto kept = kept_.view(at::kByte, {bytes}, {1}, to);
      const auto part =
          gathered_.view(at::kByte, {bytes}, {1}, from + index * bytes);
      runtime.touches(device::Stream::compute, part.const_data_ptr(),
                      part.nbytes(), device::Access::read);
      runtime.touches(device::Stream::compute, kept.const_data_ptr(),
                      kept.nbytes(), device::Access::write);
      kept.copy_(part);
    });
  }
  drop();
}

std::unique_ptr<comm::Pending> ParameterBuffers::gather_parts(
    comm::Collectives& group) {
  auto& runtime = memory_->runtime();
  bind_gathered(
      memory_->lease(memory::Category::gathered, *unit_, gathered_bytes()));
  runtime.wait(device::Stream::gather, runtime.record(device::Stream::compute));
  const device::StreamScope scope(runtime, device::Stream::gather);
  std::vector<at::Tensor> outs;
  std::vector<at::Tensor> ins;
  for_each_part(group.size(), [&](auto to, auto from, auto bytes) {
    outs.push_back(gathered_.view(at::kByte, {group.size() * bytes}, {1}, to));
    ins.push_back(kept_.view(at::kByte, {bytes}, {1}, from));
  });
  try {
    return group.all_gather(outs, ins, *unit_);
  } catch (...) {
    // The calls before the one that failed already write to these bytes.
    runtime.wait(device::Stream::compute,
                 runtime.record(device::Stream::gather));
    drop();
    throw;
  }
}

void ParameterBuffers::drop_part() {
  kept_.unbind();
  kept_bytes_ = 0;
}

}  // namespace lowtide::shard
