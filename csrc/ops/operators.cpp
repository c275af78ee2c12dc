// torch.ops.lowtide.*: the operators of this room, for programs and torch's own
// checks.  The engine calls the functions.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <vector>

#include "base/check.h"
#include "ops/clipping.h"
#include "ops/foreach.h"
#include "ops/rows.h"
#include "ops/weight_gradient.h"

namespace lowtide::ops {
namespace {

TORCH_LIBRARY_FRAGMENT(lowtide, m) {
  m.def("foreach_copy_(Tensor(a!)[] self, Tensor[] source) -> ()");
  m.def("foreach_add_(Tensor(a!)[] self, Tensor[] source) -> ()");
  m.def("foreach_scale_(Tensor(a!)[] self, Tensor factor) -> ()");
  m.def("foreach_l2_norm(Tensor[] self) -> Tensor");
  m.def("add_rows_(Tensor(a!) self, Tensor index, Tensor rows) -> ()");
  m.def(
      "weight_gradient_(Tensor(a!) self, Tensor grad_output, Tensor "
      "activation, "
      "bool accumulate) -> ()");
}

// From an operator, torch 2.15 passes on only what its own exceptions say of
// their kind.
template <auto function>
struct Operator;
template <typename Result, typename... Arguments,
          Result (*function)(Arguments...)>
struct Operator<function> {
  static Result call(Arguments... arguments) {
    try {
      return function(arguments...);
    } catch (const InvalidArgument& error) {
      throw c10::ValueError(error.what(), /*backtrace=*/nullptr);
    }
  }
};
template <auto function>
constexpr auto operation = &Operator<function>::call;

void implement(torch::Library& m) {
  m.impl("foreach_copy_", operation<&foreach_copy>);
  m.impl("foreach_add_", operation<&foreach_add>);
  m.impl("foreach_scale_", operation<&foreach_scale>);
  m.impl("foreach_l2_norm", operation<&foreach_l2_norm>);
  m.impl("add_rows_", operation<&add_rows>);
  m.impl("weight_gradient_", operation<&weight_gradient>);
}

void copy_on_meta(at::TensorList to, at::TensorList from) {
  require_pairs("foreach_copy_", to, from);
}

void add_on_meta(at::TensorList to, at::TensorList from) {
  require_pairs("foreach_add_", to, from);
}

at::Tensor norm_on_meta(at::TensorList tensors) {
  require_norm_arguments(tensors);
  return at::empty({}, tensors[0].options().dtype(at::kFloat));
}

TORCH_LIBRARY_IMPL(lowtide, CPU, m) { implement(m); }
#ifdef LOWTIDE_WITH_CUDA
TORCH_LIBRARY_IMPL(lowtide, CUDA, m) { implement(m); }
#endif
TORCH_LIBRARY_IMPL(lowtide, Meta, m) {
  m.impl("foreach_copy_", operation<&copy_on_meta>);
  m.impl("foreach_add_", operation<&add_on_meta>);
  m.impl("foreach_scale_", operation<&require_scale_arguments>);
  m.impl("foreach_l2_norm", operation<&norm_on_meta>);
  m.impl("add_rows_", operation<&require_rows_arguments>);
  m.impl("weight_gradient_", operation<&require_weight_gradient_arguments>);
}

// Version counters see what is written: `self`, in all of them.
void count_writes(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const c10::IValue self = torch::jit::last(*stack, count)[0];
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  const auto written = self.isTensor()
                           ? std::vector<at::Tensor>{self.toTensor()}
                           : self.toTensorVector();
  for (const auto& tensor : written) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

TORCH_LIBRARY_IMPL(lowtide, ADInplaceOrView, m) {
  for (const char* name : {"foreach_copy_", "foreach_add_", "foreach_scale_",
                           "add_rows_", "weight_gradient_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&count_writes>());
  }
}

}  // namespace
}  // namespace lowtide::ops
