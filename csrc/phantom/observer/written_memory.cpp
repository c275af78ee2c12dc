// Tells the dry driver which memory torch hands out again or writes, so that
// bytes of the host that lay there are no longer taken for its contents.
//
// A library of its own, built against torch and loaded into the process that
// has the driver (lowtide/phantom/dry/values.py).
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "phantom/observer/assumptions.h"
#include "phantom/observer/balanced_choices.h"
#include "phantom/observer/cudnn_workspace.h"
#include "phantom/observer/driver.h"
#include "phantom/observer/known_values.h"
#include "phantom/observer/operator_traits.h"
#include "phantom/observer/operator_work.h"

namespace lowtide::dry {
namespace {

using Values = c10::ArrayRef<const c10::IValue>;

void forget_facts(const void* first, std::int64_t bytes) {
  uniform_truths().forget(first, bytes);
  choices().forget(first, bytes);
  shares().forget(first, bytes);
}

void forget(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage()) return;
  const auto& storage = tensor.storage();
  const auto* first = first_byte(storage);
  if (first == nullptr) return;
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  forget_facts(first, bytes);
  if (tensor.is_non_overlapping_and_dense()) {
    driver_forgets(tensor.const_data_ptr(),
                   static_cast<std::int64_t>(tensor.nbytes()));
    return;
  }
  driver_forgets(first, bytes);
}

void forget(const at::IValue& value) {
  if (value.isTensor()) {
    forget(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) forget(tensor);
  }
}

void forget(Values values, const std::vector<std::size_t>& places) {
  for (const auto place : places) {
    if (place < values.size()) forget(values[place]);
  }
}

// Operators of others that the calling thread is in.
thread_local int foreign_depth = 0;

// What they fill is there to be written by kernels of theirs, which nobody
// sees: by an operator that reads no tensor.
bool fills_for_others(const at::RecordFunction& function) {
  if (foreign_depth == 0) return false;
  const auto& overwritten = traits_of(function).overwritten;
  const auto inputs = function.inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool reads = i >= overwritten.size() || !overwritten[i];
    if (reads && (inputs[i].isTensor() || inputs[i].isTensorList())) {
      return false;
    }
  }
  return true;
}

// What comes to the host as numbers that it counts with, and nobody computed.
void note_copy(const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  if (std::string_view(function.name()) != "aten::copy_" || inputs.size() < 2 ||
      !inputs[0].isTensor() || !inputs[1].isTensor()) {
    return;
  }
  const at::Tensor& from = inputs[1].toTensor();
  if (!from.defined() || !from.is_cuda() || inputs[0].toTensor().is_cuda() ||
      from.numel() == 0 ||
      !c10::isIntegralType(from.scalar_type(), /*includeBool=*/true) ||
      is_known(from)) {
    return;
  }
  assume("whole numbers and truth values that are copied back are 0");
}

// An operator that runs.
struct Call : at::ObserverContext {
  std::unique_ptr<KnownCall> known;
  std::optional<BalancedCall> balanced;
  std::optional<OperatorWork> work;  // while time is kept
  bool is_foreign = false;
  bool fills_for_others = false;
  bool has_workspace = false;  // of cuDNN's
};

// Before the operator runs: what it copies from the host is kept again.
std::unique_ptr<at::ObserverContext> before_operator(
    const at::RecordFunction& function) {
  auto call = std::make_unique<Call>();
  if (driver_keeps_time() && OperatorWork::is_known_of(function)) {
    driver_enters(function.name());
    call->work.emplace(function);
  }
  if (const auto bytes = cudnn_workspace(function)) {
    driver_asks_workspace(*bytes);
    call->has_workspace = true;
  }
  note_copy(function);
  call->fills_for_others = fills_for_others(function);
  if (!call->fills_for_others) call->known = KnownCall::before(function);
  call->balanced = BalancedCall::before(function);
  const auto& traits = traits_of(function);
  forget(function.inputs(), traits.written);
  call->is_foreign = traits.is_foreign;
  foreign_depth += traits.is_foreign ? 1 : 0;
  return call;
}

void after_operator(const at::RecordFunction& function,
                    at::ObserverContext* context) {
  if (context == nullptr) return;  // its beginning raised, which torch says
  const auto& call = *static_cast<const Call*>(context);
  if (call.work) driver_leaves(call.work->with_results(function));
  if (call.has_workspace) driver_asks_workspace(0);
  foreign_depth -= call.is_foreign ? 1 : 0;
  if (call.known && call.known->after(function)) return;
  const auto& traits = traits_of(function);
  const auto& results = function.outputs();
  if (call.fills_for_others) {
    for (const auto& result : results) forget(result);
  } else if (traits.has_kernel && !traits.is_answered) {
    // What its kernel wrote over zeros that it asked for, say.
    forget(Values(results.data(), results.size()), traits.made);
  }
  if (call.balanced) call.balanced->after(function);
}

void after_allocator(const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
  if (entry.action_ !=
      c10::cuda::CUDACachingAllocator::TraceEntry::Action::ALLOC) {
    return;
  }
  const auto* first = reinterpret_cast<const void*>(entry.addr_);
  const auto bytes = static_cast<std::int64_t>(entry.size_);
  driver_forgets(first, bytes);
  forget_facts(first, bytes);
}

}  // namespace
}  // namespace lowtide::dry

extern "C" {

// Once CUDA is initialised.
__attribute__((visibility("default"))) void lowtide_dry_observe() {
  using namespace lowtide::dry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(after_allocator);
  at::addGlobalCallback(
      at::RecordFunctionCallback(before_operator, after_operator)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION}));
}

// Of a storage's elements those that are not zero, or -1.
__attribute__((visibility("default"))) double lowtide_dry_share(
    const void* first, std::int64_t bytes) {
  return lowtide::dry::shares().of(first, bytes).value_or(-1);
}

// How many values there are that a storage's elements were chosen of, or -1.
__attribute__((visibility("default"))) std::int64_t lowtide_dry_choices(
    const void* first, std::int64_t bytes) {
  return lowtide::dry::choices().of(first, bytes).value_or(-1);
}

// What all elements of a storage of truth values are, or -1.
__attribute__((visibility("default"))) int lowtide_dry_uniform_truth(
    const void* first, std::int64_t bytes) {
  const auto truth = lowtide::dry::uniform_truths().of(first, bytes);
  return truth ? static_cast<int>(*truth) : -1;
}

}  // extern "C"
