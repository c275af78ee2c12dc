#include "ops/foreach.h"

#include "base/check.h"
#include "base/trace.h"
#ifdef LOWTIDE_WITH_CUDA
#include "ops/cuda/foreach.h"
#endif

namespace lowtide::ops {

void require_pairs(const char* name, at::TensorList to, at::TensorList from) {
  constexpr const char* kLibrary = "torch.ops.lowtide.";
  if (to.size() != from.size()) {
    throw InvalidArgument(base::error_text(
        base::concat(kLibrary, name),
        base::concat(to.size(), " sources, one for each destination"),
        base::concat(from.size()), "Pass lists of equal lengths."));
  }
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (to[i].sym_sizes() != from[i].sym_sizes()) {
      throw InvalidArgument(
          base::error_text(base::concat(kLibrary, name, ": pair ", i),
                           base::concat("a source of ", to[i].sym_sizes()),
                           base::concat(from[i].sym_sizes()),
                           "Expand the source first: nothing is broadcast."));
    }
  }
}

void foreach_copy(at::TensorList to, at::TensorList from) {
  const base::OperatorRange range("lowtide::foreach_copy_", [&] {
    return std::vector<c10::IValue>{to, from};
  });
  require_pairs("foreach_copy_", to, from);
#ifdef LOWTIDE_WITH_CUDA
  if (!to.empty() && to[0].is_cuda()) return cuda::foreach_copy(to, from);
#endif
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i].copy_(from[i]);
  }
}

void foreach_add(at::TensorList to, at::TensorList from) {
  const base::OperatorRange range("lowtide::foreach_add_", [&] {
    return std::vector<c10::IValue>{to, from};
  });
  require_pairs("foreach_add_", to, from);
#ifdef LOWTIDE_WITH_CUDA
  if (!to.empty() && to[0].is_cuda()) return cuda::foreach_add(to, from);
#endif
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i].add_(from[i]);
  }
}

}  // namespace lowtide::ops
