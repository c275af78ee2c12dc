#include "comm/call_observer.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "base/check.h"

namespace lowtide::comm {
namespace {

std::atomic<CallListener*> listener{nullptr};
thread_local const std::string* current_label = nullptr;
// c10d:: operators this thread is in: what a backend does inside is the same
// call.
thread_local int depth = 0;

struct Names {
  std::string_view part;
  std::string_view kind;
};
// Matched in order, as a part of the name.
constexpr Names kKinds[] = {
    {"allreduce", "all-reduce"},
    {"all_reduce", "all-reduce"},
    {"allgather", "all-gather"},
    {"all_gather", "all-gather"},
    {"reduce_scatter", "reduce-scatter"},
    {"alltoall", "all-to-all"},
    {"all_to_all", "all-to-all"},
    {"broadcast", "broadcast"},
    {"barrier", "barrier"},
    {"scatter", "scatter"},
    {"gather", "gather"},
    {"reduce", "reduce"},
    {"send", "send"},
    {"recv", "receive"},
};

std::string kind_of(std::string_view name) {
  for (const Names& names : kKinds) {
    if (name.find(names.part) != name.npos) return std::string(names.kind);
  }
  return std::string(name);
}

bool has_prefix(std::string_view name, std::string_view prefix) {
  return name.substr(0, prefix.size()) == prefix;
}

void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& into) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) into.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      into.push_back(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      add_tensors(element, into);
    }
  }
}

std::string describe(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return "no tensor";
  if (tensors.size() > 1) return base::concat(tensors.size(), " tensors");
  std::string sizes;
  for (const std::int64_t size : tensors[0].sizes()) {
    sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  }
  const auto dtype = c10::getDtypeNames(tensors[0].scalar_type()).first;
  return base::concat(dtype, "[", sizes, "]");
}

// The larger of the call's tensor arguments, which is the full buffer.
void note_value(const at::RecordFunction& record, ObservedCall& call) {
  std::vector<at::Tensor> largest;
  for (const c10::IValue& input : record.inputs()) {
    if (input.isCustomClass()) {
      const auto held = input.toObjectRef().getSlot(0).toCapsule();
      if (const auto* group = dynamic_cast<c10d::ProcessGroup*>(held.get())) {
        call.group = group->getGroupName();
      }
      continue;
    }
    std::vector<at::Tensor> tensors;
    add_tensors(input, tensors);
    std::int64_t bytes = 0;
    for (const at::Tensor& tensor : tensors) {
      bytes += static_cast<std::int64_t>(tensor.nbytes());
    }
    if (bytes > call.bytes || largest.empty()) {
      call.bytes = bytes;
      largest = std::move(tensors);
    }
  }
  call.value = describe(largest);
}

void tell(const at::RecordFunction& record, CallListener& to) {
  ObservedCall call;
  call.kind = kind_of(record.name());
  note_value(record, call);
  if (current_label != nullptr) call.issuer = *current_label;
  if (const auto node = torch::autograd::get_current_node()) {
    call.in_backward = true;
    call.node_thread = node->thread_id();
    call.node_sequence = node->sequence_nr();
    call.node_name = node->name();
  }
  to.collective(call);
}

struct InGroup final : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> on_start(
    const at::RecordFunction& record) {
  CallListener* to = listener.load();
  if (to == nullptr) return nullptr;
  if (record.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    to->node(record.forwardThreadId(),
             static_cast<std::uint64_t>(record.seqNr()));
    return nullptr;
  }
  const std::string_view name = record.name();
  if (has_prefix(name, "c10d::")) {
    if (depth == 0) tell(record, *to);
    ++depth;
    return std::make_unique<InGroup>();
  }
  const bool from_backend =
      has_prefix(name, "gloo:") || has_prefix(name, "nccl:") ||
      has_prefix(name, "ucc:") || has_prefix(name, "mpi:");
  if (from_backend && depth == 0) tell(record, *to);
  return nullptr;
}

void on_end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context != nullptr) --depth;
}

}  // namespace

Observation::Observation(CallListener& to) {
  CallListener* nobody = nullptr;
  LOWTIDE_INVARIANT(listener.compare_exchange_strong(nobody, &to),
                    "one listener at a time");
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(on_start, on_end)
          .needsInputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE,
                   at::RecordScope::BACKWARD_FUNCTION}));
}

Observation::~Observation() {
  at::removeCallback(handle_);
  listener = nullptr;
}

IssuedBy::IssuedBy(const std::string& label)
    : outer_(std::exchange(current_label, &label)) {}

IssuedBy::~IssuedBy() { current_label = outer_; }

}  // namespace lowtide::comm
