#include "shard/parameters/kept_part.h"

#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "memory/flat_layout.h"

namespace lowtide::shard {
namespace {

// Calls `visit(run, offset among the kept bytes, bytes of a part)`; returns all
// kept bytes.
template <typename Visit>
std::int64_t for_each_part(c10::ArrayRef<KeptPart::Run> runs,
                           std::int64_t parts, Visit visit) {
  std::int64_t kept = 0;
  for (const auto& run : runs) {
    const auto bytes = run.bytes / parts;
    if (bytes > 0) {
      visit(run, kept, bytes);
    }
    kept += at::round_up(bytes, memory::kAlignment);
  }
  return kept;
}

}  // namespace

KeptPart::KeptPart(UnitName unit, std::shared_ptr<memory::DeviceMemory> memory)
    : unit_(std::move(unit)),
      memory_(std::move(memory)),
      storage_(memory_->runtime().device()) {}

void KeptPart::keep(c10::ArrayRef<Run> runs, std::int64_t index,
                    std::int64_t parts) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  bytes_ = for_each_part(runs, parts, [](const auto&, auto, auto) {});
  if (bytes_ == 0) {
    return;
  }
  storage_.own(memory_->lease(memory::Category::gathered, *unit_, bytes_),
               bytes_);
  auto& runtime = memory_->runtime();
  for_each_part(runs, parts, [&](const Run& run, auto to, auto bytes) {
    auto kept = storage_.view(at::kByte, {bytes}, {1}, to);
    const auto part =
        run.buffer->view(at::kByte, {bytes}, {1}, run.offset + index * bytes);
    runtime.touches(device::Stream::compute, part.const_data_ptr(),
                    part.nbytes(), device::Access::read);
    runtime.touches(device::Stream::compute, kept.const_data_ptr(),
                    kept.nbytes(), device::Access::write);
    kept.copy_(part);
  });
}

KeptPart::Lists KeptPart::lists(c10::ArrayRef<Run> runs,
                                std::int64_t parts) const {
  Lists lists;
  for_each_part(runs, parts, [&](const Run& run, auto from, auto bytes) {
    lists.outs.push_back(
        run.buffer->view(at::kByte, {parts * bytes}, {1}, run.offset));
    lists.ins.push_back(storage_.view(at::kByte, {bytes}, {1}, from));
  });
  return lists;
}

void KeptPart::drop() {
  storage_.unbind();
  bytes_ = 0;
}

}  // namespace lowtide::shard
