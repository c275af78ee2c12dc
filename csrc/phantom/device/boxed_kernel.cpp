#include "phantom/device/boxed_kernel.h"

#include <ATen/core/function_schema.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "phantom/device/device_clock.h"
#include "phantom/device/host_call.h"
#include "phantom/device/operator_list.h"
#include "phantom/device/operator_work.h"
#include "phantom/device/phantom_device.h"
#include "phantom/device/random_scope.h"

namespace lowtide::phantom {
namespace {

using c10::IValue;
using torch::jit::Stack;

std::ptrdiff_t count(std::size_t values) {
  return static_cast<std::ptrdiff_t>(values);
}

OperatorRule required_rule(const c10::OperatorHandle& op) {
  const std::string name = toString(op.operator_name());
  if (depends_on_values(op)) {
    throw Error(base::error_text(
        base::concat("phantom: operator ", name),
        "a result that follows from the arguments' shapes",
        "one that depends on their values, which meta mode does not have",
        "Use install(mode='exact'), or compute it on the CPU."));
  }
  if (const auto rule = find_rule(op)) return *rule;
  throw Error(base::error_text(
      base::concat("phantom: operator ", name),
      "one whose memory on CUDA is known", "one that is not on the list",
      base::concat("Pass allow=['", op.schema().name(), "'], or --allow ",
                   op.schema().name(),
                   " to `lowtide plan`, to count its outputs alone.")));
}

// As on CUDA: scalars may come from the CPU, and indices.
void require_one_device(const c10::OperatorHandle& op, const Stack& stack) {
  const std::string& name = op.schema().name();
  if (name.find("index") != std::string::npos) return;
  const std::size_t num_arguments = op.schema().arguments().size();
  for (const IValue& value : torch::jit::last(stack, num_arguments)) {
    if (!value.isTensor()) continue;
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || is_phantom(tensor) || tensor.dim() == 0) {
      continue;
    }
    throw Error(base::error_text(
        base::concat("phantom: operator ", name), "all tensors on one device",
        base::concat("phantom:0 and ", tensor.device()),
        "Move the other tensor with .to('phantom')."));
  }
}

IValue host_argument(IValue value, HostCall& call, bool exact) {
  if (value.isTensor()) return call.host(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      tensors.push_back(call.host(tensor));
    }
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor ? std::optional(call.host(*tensor))
                               : std::nullopt);
    }
    return tensors;
  }
  if (value.isDevice() && value.toDevice().type() == kPhantom) {
    return c10::Device(exact ? c10::kCPU : c10::kMeta);
  }
  return value;
}

IValue phantom_result(IValue value, HostCall& call) {
  if (value.isTensor()) return call.phantom(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      tensors.push_back(call.phantom(tensor));
    }
    return tensors;
  }
  return value;
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack, bool exact) {
  const auto key = exact ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  } catch (const c10::NotImplementedError& error) {
    if (!exact && op.schema().returns().empty()) {
      // Nothing comes out, so there is no shape to find out.
      torch::jit::drop(*stack, op.schema().arguments().size());
      return;
    }
    throw Error(base::error_text(
        base::concat("phantom: operator ", toString(op.operator_name())),
        base::concat("a kernel for ", c10::toString(key)), "none",
        exact ? "Register one, or run this part on the CPU."
              : "Register one, or use install(mode='exact')."));
  }
}

// The arguments that an in-place or out= operator returns, by result.  A host
// kernel may return another tensor than it was given.
std::vector<IValue> returned_arguments(const c10::FunctionSchema& schema,
                                       const Stack& stack) {
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  std::vector<IValue> returned(schema.returns().size());
  for (std::size_t r = 0; r < returned.size(); ++r) {
    const auto* alias = schema.returns()[r].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for (std::size_t a = 0; a < arguments.size(); ++a) {
      const auto* other = schema.arguments()[a].alias_info();
      if (other != nullptr && *other == *alias) returned[r] = arguments[a];
    }
  }
  return returned;
}

// Takes the arguments off the stack and puts the results there.
void compute(const c10::OperatorHandle& op, Stack* stack, bool exact) {
  HostCall call;
  const RandomScope random(op, *stack);
  const auto returned = returned_arguments(op.schema(), *stack);
  const auto num_arguments = count(op.schema().arguments().size());
  for (auto value = stack->end() - num_arguments; value < stack->end();
       ++value) {
    *value = host_argument(std::move(*value), call, exact);
  }
  run_on_host(op, stack, exact);
  call.update_arguments();
  const auto first_result = stack->end() - count(returned.size());
  for (std::size_t r = 0; r < returned.size(); ++r) {
    IValue& value = first_result[count(r)];
    value = returned[r].isNone() ? phantom_result(std::move(value), call)
                                 : returned[r];
  }
}

// What the device's clock has to know, collected before the arguments go.
class TimedCall {
 public:
  TimedCall(const c10::OperatorHandle& op, const Stack& stack) : op_(op) {
    if (!device_clock().runs()) return;
    arguments_ = torch::jit::last(stack, op.schema().arguments().size()).vec();
  }

  void ended(const Stack& stack) const {
    const auto timeline = device_clock().timeline();
    if (!timeline) return;
    timeline->issue();
    const auto results = torch::jit::last(stack, op_.schema().returns().size());
    if (const auto work = operator_work(op_, arguments_, results)) {
      timeline->run(current_stream(), op_.schema().name(), *work);
    }
  }

 private:
  const c10::OperatorHandle& op_;
  std::vector<IValue> arguments_;
};

void allocate_and_compute(const c10::OperatorHandle& op, Stack* stack) {
  const bool exact = phantom_device().exact();
  const auto rule = exact ? find_rule(op) : required_rule(op);
  require_one_device(op, *stack);
  if (!rule || rule->allocations == nullptr) {
    compute(op, stack, exact);
    return;
  }
  const auto arguments =
      torch::jit::last(*stack, op.schema().arguments().size());
  bool computed = false;
  rule->allocations(CudaCall(op, arguments.vec(), [&] {
    compute(op, stack, exact);
    computed = true;
  }));
  LOWTIDE_INVARIANT(computed, "a rule runs the operator");
}

}  // namespace

void boxed_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const TimedCall timed(op, *stack);
  allocate_and_compute(op, stack);
  timed.ended(*stack);
}

}  // namespace lowtide::phantom
