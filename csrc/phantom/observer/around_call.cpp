// What goes on around a call of NCCL (lowtide/phantom/dry/calls.py): the
// innermost range that a profiler would show there, such as
// "FSDP::all_gather (layers.3)", and torch's name for the operation.
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <vector>

namespace lowtide::dry {
namespace {

struct Range {
  std::string name;
  std::atomic<bool> over = false;
};

// Of the calling thread, innermost last.
std::vector<std::shared_ptr<Range>>& open_ranges() {
  thread_local std::vector<std::shared_ptr<Range>> ranges;
  return ranges;
}

// A range may end on another thread than it began on.
struct OpenRange : at::ObserverContext {
  std::shared_ptr<Range> range;
};

// Of the calling thread: torch's name for the collective that it is in.
std::string operation() {
  const auto* info = static_cast<torch::ParamCommsDebugInfo*>(
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PARAM_COMMS_INFO));
  return info == nullptr ? "" : info->getCollectiveName();
}

// The ranges of torch's groups, which nccl2 (torch 2.14) calls as the
// operation, say no more than NCCL's calls.
std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  if (name.starts_with("nccl:") || name == operation()) return nullptr;
  auto open = std::make_unique<OpenRange>();
  open->range = std::make_shared<Range>();
  open->range->name = name;
  open_ranges().push_back(open->range);
  return open;
}

void end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  static_cast<OpenRange*>(context)->range->over = true;
  auto& ranges = open_ranges();
  while (!ranges.empty() && ranges.back()->over) ranges.pop_back();
}

std::string innermost() {
  auto& ranges = open_ranges();
  while (!ranges.empty() && ranges.back()->over) ranges.pop_back();
  return ranges.empty() ? "" : ranges.back()->name;
}

}  // namespace
}  // namespace lowtide::dry

extern "C" {

__attribute__((visibility("default"))) void lowtide_dry_follow_ranges() {
  using namespace lowtide::dry;
  at::addGlobalCallback(at::RecordFunctionCallback(begin, end)
                            .scopes({at::RecordScope::USER_SCOPE}));
}

// Of the calling thread: range and operation with a tab between them; each may
// be empty.  Valid until the thread's next call.
__attribute__((visibility("default"))) const char* lowtide_dry_around_call() {
  thread_local std::string text;
  text = lowtide::dry::innermost() + "\t" + lowtide::dry::operation();
  return text.c_str();
}

}  // extern "C"
