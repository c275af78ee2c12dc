#include "comm/tensor_lists.h"

namespace lowtide::comm {
namespace {

void check(Kind kind, const at::Tensor& out, const at::Tensor& in,
           at::ScalarType dtype, std::int64_t size) {
  LOWTIDE_INVARIANT(out.is_contiguous() && in.is_contiguous(),
                    "buffers of a collective are contiguous");
  LOWTIDE_INVARIANT(out.scalar_type() == dtype && in.scalar_type() == dtype,
                    "buffers of a collective have one dtype");
  const bool gathers = kind == Kind::all_gather;
  const bool whole = kind == Kind::all_reduce || kind == Kind::all_to_all;
  const std::int64_t full = gathers ? out.numel() : in.numel();
  const std::int64_t part = gathers ? in.numel() : out.numel();
  LOWTIDE_INVARIANT(full == (whole ? 1 : size) * part,
                    "the full buffer holds one piece of every rank");
  LOWTIDE_INVARIANT(kind != Kind::all_to_all || full % size == 0,
                    "an all-to-all sends equal parts");
}

}  // namespace

std::int64_t TensorLists::full_bytes(Kind kind) const {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : kind == Kind::all_gather ? outs : ins) {
    bytes += static_cast<std::int64_t>(tensor.nbytes());
  }
  return bytes;
}

TensorLists checked_lists(Kind kind, const std::vector<at::Tensor>& outs,
                          const std::vector<at::Tensor>& ins,
                          std::int64_t size) {
  LOWTIDE_INVARIANT(outs.size() == ins.size(),
                    "a collective has as many outputs as inputs");
  TensorLists lists;
  if (outs.empty()) return lists;
  // Gathers move bytes, so one call can carry a unit of mixed dtypes.
  const at::ScalarType dtype =
      kind == Kind::all_gather ? at::kByte : outs[0].scalar_type();
  for (std::size_t i = 0; i < outs.size(); ++i) {
    check(kind, outs[i], ins[i], dtype, size);
    if (outs[i].numel() == 0) continue;
    lists.outs.push_back(outs[i]);
    lists.ins.push_back(ins[i]);
  }
  return lists;
}

}  // namespace lowtide::comm
