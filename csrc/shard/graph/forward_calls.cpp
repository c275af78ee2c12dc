#include "shard/graph/forward_calls.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace lowtide::shard {
namespace {

bool is_gone(const WeakNodePtr& call) { return call.expired(); }

}  // namespace

// The first module that is recorded is the one to watch; see [Note: Modules
// sharded together] in unit_forward.cpp.
bool ForwardCalls::enter(bool grad_mode, bool inside_recorded) {
  if (!grad_mode && inside_recorded) {
    ++without_grad_;
  }
  if (!grad_mode || recorded_) {
    return false;
  }
  recorded_ = true;
  ++without_inputs_;  // until `watch` says otherwise
  return true;
}

void ForwardCalls::watch(WeakNodePtr node) {
  --without_inputs_;
  open_.push_back(std::move(node));
}

void ForwardCalls::begin_backward() {
  nested_calls_done_ = 0;
  inside_backward_ = false;
  entered_.clear();
}

bool ForwardCalls::enter_backward(std::int64_t call) {
  const bool recorded = call == BackwardReceiver::kRecorded;
  const bool already = recorded ? inside_backward_
                                : std::find(entered_.begin(), entered_.end(),
                                            call) != entered_.end();
  if (!already && !recorded) entered_.push_back(call);
  inside_backward_ = true;
  return !already;
}

bool ForwardCalls::complete(const torch::autograd::Node* node, bool nested,
                            const Reaches& reaches) {
  inside_backward_ = false;
  if (nested) {
    ++nested_calls_done_;
  }
  bool more_to_come = graphs_.recorded() || without_inputs_on_any_ ||
                      without_inputs_ > 0 || without_grad_ > nested_calls_done_;
  const auto is_over = [&](const WeakNodePtr& weak, bool open) {
    const auto call = weak.lock();
    if (!call || call.get() == node) {
      if (call) done_now_.push_back(weak);
      return true;
    }
    // Other calls count if this backward reaches them; of the outer graph a
    // nested backward only knows that they are open.
    more_to_come |= nested ? open : reaches(call.get());
    return false;
  };
  std::erase_if(open_, [&](const auto& weak) { return is_over(weak, true); });
  std::erase_if(done_before_,
                [&](const auto& weak) { return is_over(weak, false); });
  return !more_to_come;
}

void ForwardCalls::end_backward(bool more_backwards, bool graph_kept,
                                std::int64_t optimizer_steps) {
  inside_backward_ = false;
  without_grad_ = nested_calls_done_ = 0;
  if (graph_kept && without_inputs_ > 0) {
    kept_without_inputs_ = optimizer_steps;
  }
  if (!more_backwards) {
    without_inputs_ = 0;
  }
  std::erase_if(open_, is_gone);
  graphs_.forget_expired();
  if (graph_kept) {
    graphs_.keep(done_now_);
  }
  std::move(done_now_.begin(), done_now_.end(),
            std::back_inserter(done_before_));
  done_now_.clear();
  std::erase_if(done_before_, is_gone);
}

void ForwardCalls::clear() { *this = {}; }

}  // namespace lowtide::shard
