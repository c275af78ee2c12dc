// torch.ops.lowtide.*: the operators of this room, for programs and torch's own
// checks.  The engine calls the functions.

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "ops/foreach.h"

namespace lowtide::ops {
namespace {

TORCH_LIBRARY_FRAGMENT(lowtide, m) {
  m.def("foreach_copy_(Tensor(a!)[] self, Tensor[] source) -> ()");
  m.def("foreach_add_(Tensor(a!)[] self, Tensor[] source) -> ()");
}

void implement(torch::Library& m) {
  m.impl("foreach_copy_", &foreach_copy);
  m.impl("foreach_add_", &foreach_add);
}

TORCH_LIBRARY_IMPL(lowtide, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(lowtide, PrivateUse1, m) { implement(m); }
#ifdef LOWTIDE_WITH_CUDA
TORCH_LIBRARY_IMPL(lowtide, CUDA, m) { implement(m); }
#endif
TORCH_LIBRARY_IMPL(lowtide, Meta, m) {
  m.impl("foreach_copy_", [](at::TensorList to, at::TensorList from) {
    require_pairs("foreach_copy_", to, from);
  });
  m.impl("foreach_add_", [](at::TensorList to, at::TensorList from) {
    require_pairs("foreach_add_", to, from);
  });
}
// Version counters see what is written.
TORCH_LIBRARY_IMPL(lowtide, ADInplaceOrView, m) {
  for (const char* name : {"foreach_copy_", "foreach_add_"}) {
    m.impl(name,
           torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  }
}

}  // namespace
}  // namespace lowtide::ops
