// Tells the dry driver which memory torch hands out again or writes, so that
// bytes of the host that lay there are no longer taken for its contents.
//
// A library of its own, built against torch and loaded into the process that
// has the driver (lowtide/phantom/dry/values.py).
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "phantom/observer/driver.h"
#include "phantom/observer/known_values.h"
#include "phantom/observer/operator_work.h"

namespace lowtide::dry {
namespace {

// What changes a tensor and not its bytes.
bool leaves_bytes(std::string_view name) {
  static const std::unordered_set<std::string_view> kNames = {
      "aten::as_strided_", "aten::detach_",    "aten::requires_grad_",
      "aten::resize_",     "aten::resize_as_", "aten::retain_grad",
      "aten::set_",        "aten::squeeze_",   "aten::swapaxes_",
      "aten::swapdims_",   "aten::t_",         "aten::transpose_",
      "aten::unsqueeze_",
  };
  return kNames.contains(name);
}

// Which arguments an operator writes.
std::vector<std::size_t> written(const at::RecordFunction& function) {
  std::vector<std::size_t> indices;
  if (leaves_bytes(function.name())) return indices;
  const auto schema = function.operator_schema();
  if (!schema) {  // one of lowtide's that came without the dispatcher
    const std::string_view name = function.name();
    if (name.starts_with("lowtide::")) indices.push_back(0);
    return indices;
  }
  const auto& arguments = schema->arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) indices.push_back(i);
  }
  return indices;
}

// Looked up once an operator: the text of its name stays where it is.
const std::vector<std::size_t>& written_by(const at::RecordFunction& function) {
  static std::mutex mutex;
  static std::unordered_map<const void*, std::vector<std::size_t>> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(function.name());
  if (found != known.end()) return found->second;
  return known.emplace(function.name(), written(function)).first->second;
}

void forget(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage()) return;
  const auto& storage = tensor.storage();
  const auto* first = first_byte(storage);
  if (first == nullptr) return;
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  uniform_truths().forget(first, bytes);
  if (tensor.is_non_overlapping_and_dense()) {
    driver_forgets(tensor.const_data_ptr(),
                   static_cast<std::int64_t>(tensor.nbytes()));
    return;
  }
  driver_forgets(first, bytes);
}

// An operator that runs.
struct Call : at::ObserverContext {
  std::unique_ptr<KnownCall> known;
  std::optional<OperatorWork> work;  // while time is kept
};

// Before the operator runs: what it copies from the host is kept again.
std::unique_ptr<at::ObserverContext> before_operator(
    const at::RecordFunction& function) {
  auto call = std::make_unique<Call>();
  if (driver_keeps_time() && OperatorWork::is_known_of(function)) {
    driver_enters(function.name());
    call->work.emplace(function);
  }
  call->known = KnownCall::before(function);
  const auto inputs = function.inputs();
  for (const auto index : written_by(function)) {
    if (index >= inputs.size()) continue;
    if (inputs[index].isTensor()) {
      forget(inputs[index].toTensor());
    } else if (inputs[index].isTensorList()) {
      for (const at::Tensor& tensor : inputs[index].toTensorVector()) {
        forget(tensor);
      }
    }
  }
  return call;
}

void after_operator(const at::RecordFunction& function,
                    at::ObserverContext* context) {
  const auto& call = *static_cast<const Call*>(context);
  if (call.work) driver_leaves(call.work->with_results(function));
  if (call.known) call.known->after(function);
}

void after_allocator(const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
  if (entry.action_ !=
      c10::cuda::CUDACachingAllocator::TraceEntry::Action::ALLOC) {
    return;
  }
  const auto* first = reinterpret_cast<const void*>(entry.addr_);
  const auto bytes = static_cast<std::int64_t>(entry.size_);
  driver_forgets(first, bytes);
  uniform_truths().forget(first, bytes);
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

}  // extern "C"
