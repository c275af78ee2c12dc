#include "ops/rows.h"

#include <ATen/Context.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include "base/check.h"
#include "base/trace.h"
#ifdef LOWTIDE_WITH_CUDA
#include "ops/cuda/rows.h"
#endif

namespace lowtide::ops {
namespace {

// Rows that belong nowhere add nothing to row 0, as -0.0 does to any number.
void add_by_index(const at::Tensor& self, const at::Tensor& index,
                  const at::Tensor& rows) {
  if (self.numel() == 0 || index.numel() == 0) return;
  const auto inside = index.ge(0).logical_and_(index.lt(self.size(0)));
  const auto cast = rows.to(self.scalar_type());
  self.index_add_(0, index.mul(inside),
                  at::where(inside.unsqueeze(1), cast,
                            at::scalar_tensor(-0.0, cast.options())));
}

}  // namespace

void require_rows_arguments(const at::Tensor& self, const at::Tensor& index,
                            const at::Tensor& rows) {
  const bool fits = self.dim() == 2 && index.dim() == 1 && rows.dim() == 2 &&
                    rows.sym_size(0) == index.sym_size(0) &&
                    rows.sym_size(1) == self.sym_size(1);
  if (!fits || index.scalar_type() != at::kLong) {
    throw InvalidArgument(base::error_text(
        "torch.ops.lowtide.add_rows_",
        "self [n, width], an int64 index [k] and rows [k, width]",
        base::concat(self.sym_sizes(), ", ", c10::toString(index.scalar_type()),
                     " ", index.sym_sizes(), " and ", rows.sym_sizes()),
        "Flatten all dimensions but the last."));
  }
}

void add_rows(const at::Tensor& self, const at::Tensor& index,
              const at::Tensor& rows) {
  require_rows_arguments(self, index, rows);
  const base::OperatorRange range("lowtide::add_rows_", [&] {
    return std::vector<c10::IValue>{self, index, rows};
  });
#ifdef LOWTIDE_WITH_CUDA
  if (cuda::takes_rows(self, index, rows) &&
      !at::globalContext().deterministicAlgorithms()) {
    return cuda::add_rows(self, index, rows);
  }
#endif
  add_by_index(self, index, rows);
}

}  // namespace lowtide::ops
