// The part of UnitGradients for results that stay with the shards until a
// backward sums them over the replicas.
#include <ATen/core/LegacyTypeDispatch.h>

#include "shard/storage.h"
#include "shard/unit_gradients.h"

namespace lowtide::shard {

using device::Access;

// [Note: Partial gradients]
// FSDP2 keeps one flat tensor a unit; here a parameter's slice is kept by
// itself, because two backwards may cut the unit differently.  Untouched
// elements are -0.0, so that keeping is adding from the first time on.
bool UnitGradients::prepare_partial() {
  bool leased = false;
  for (const auto& lane : lanes_) {
    for (const auto i : lane.members) {
      if (!parameter(i).partial.defined()) {
        lease_partial(i);
        leased = true;
      }
    }
  }
  return leased;
}

void UnitGradients::lease_partial(std::int32_t i) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto& p = parameter(i);
  const auto dtype = infos_[static_cast<std::size_t>(i)].reduce_dtype;
  const auto bytes = (p.shard_numel + 1) * itemsize(dtype);
  const auto storage = owning_storage(
      memory_->lease(memory::Category::sharded_gradients, *unit_, bytes),
      bytes);
  p.partial = flat_view(storage, dtype, 0, p.shard_numel);
  p.partial_flag =
      flat_view(storage, dtype, p.shard_numel * itemsize(dtype), 1);
  for (const auto& tensor : {p.partial, p.partial_flag}) {
    touch(tensor, Access::write);
    tensor.fill_(-0.0);
  }
}

void UnitGradients::touch(const at::Tensor& tensor, Access access) {
  auto& runtime = memory_->runtime();
  runtime.touches(runtime.current(), tensor.const_data_ptr(), tensor.nbytes(),
                  access);
}

void UnitGradients::add(const at::Tensor& to, const at::Tensor& from) {
  touch(from, Access::read);
  touch(to, Access::write);
  to.add_(from);
}

void UnitGradients::drop_partial() {
  for (auto& p : parameters_) {
    p.partial.reset();
    p.partial_flag.reset();
  }
}

void UnitGradients::exchange_partial(const std::vector<Piece>& pieces,
                                     const at::Tensor& row) {
  for (const auto& piece : pieces) {
    const auto& kept = parameter(piece.parameter).partial;
    if (reduction_.all_reduce && !kept.defined()) {
      continue;
    }
    const auto of_row = slice_of(row, piece.column, piece.size());
    const auto of_kept = slice_of(kept, piece.begin, piece.size());
    reduction_.all_reduce ? add(of_row, of_kept) : add(of_kept, of_row);
  }
}

void UnitGradients::exchange_partial_flags(const Lane& lane,
                                           const at::Tensor& flags) {
  for (const auto i : lane.members) {
    const auto& kept = parameter(i).partial_flag;
    if (reduction_.all_reduce && !kept.defined()) {
      continue;
    }
    const auto flag = slice_of(flags, i, 1);
    reduction_.all_reduce ? add(flag, kept) : add(kept, flag);
  }
}

}  // namespace lowtide::shard
