#include "ops/foreach.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>

#include "base/check.h"
#include "base/trace.h"
#ifdef LOWTIDE_WITH_CUDA
#include "ops/cuda/foreach.h"
#endif

namespace lowtide::ops {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Nobody but the CPU's own kernel has a say in what is done with `tensor`.
bool is_plain(const at::Tensor& tensor) {
  constexpr DispatchKeySet kPlain({DispatchKey::CPU, DispatchKey::AutogradCPU,
                                   DispatchKey::AutocastCPU,
                                   DispatchKey::ADInplaceOrView});
  const auto keys = tensor.key_set();
  return (keys | kPlain) == kPlain && tensor.has_storage();
}

// Nor is anything recorded or watched on this thread.
bool is_below_everything() {
  constexpr DispatchKeySet kWatching(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
       DispatchKey::PythonDispatcher, DispatchKey::Functionalize,
       DispatchKey::FuncTorchDynamicLayerFrontMode});
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return local.excluded_.has(DispatchKey::ADInplaceOrView) &&
         !local.included_.has_any(kWatching);
}

// [Note: Small copies on CPUs]
// at::copy_ takes thousands of instructions whatever the bytes, and a unit's
// small parameters are copied into place in every gather.  Matrices of rows of
// consecutive elements need no more than their rows: whether it copied them.
bool copy_rows(const at::Tensor& to, const at::Tensor& from) {
  if (!is_plain(to) || !is_plain(from) ||
      to.scalar_type() != from.scalar_type() || to.dim() == 0 || to.dim() > 3) {
    return false;
  }
  const auto width = to.size(-1);
  if (width > 1 && (to.stride(-1) != 1 || from.stride(-1) != 1)) return false;
  // Dimension -1 - d, or one of a single place.
  const auto size = [&](std::int64_t d) {
    return to.dim() > d ? to.size(-1 - d) : 1;
  };
  const auto step = [](const at::Tensor& tensor, std::int64_t d) {
    return tensor.dim() > d ? tensor.stride(-1 - d) * tensor.itemsize() : 0;
  };
  const auto bytes = static_cast<std::size_t>(width * to.itemsize());
  auto* const out = static_cast<char*>(to.mutable_data_ptr());
  const auto* const in = static_cast<const char*>(from.const_data_ptr());
  if (to.numel() == 0) return true;
  for (std::int64_t i = 0; i < size(2); ++i) {
    for (std::int64_t j = 0; j < size(1); ++j) {
      std::memmove(out + i * step(to, 2) + j * step(to, 1),
                   in + i * step(from, 2) + j * step(from, 1), bytes);
    }
  }
  return true;
}

}  // namespace

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
  const bool directly = is_below_everything();
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (!directly || !copy_rows(to[i], from[i])) {
      to[i].copy_(from[i]);
    }
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
