// Ranges that torch's profilers show: "lowtide::gather (layers.3)".
#pragma once

#include <ATen/record_function.h>

#include <string>
#include <utility>
#include <vector>

#include "base/check.h"

namespace lowtide::base {

// Costs a thread-local read while no profiler runs.
class TraceRange {
 public:
  TraceRange(const char* label, const std::string& unit)
      : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) {
      range_.before(concat(label, " (", unit, ")"));
    }
  }

 private:
  at::RecordFunction range_;
};

// An operator of ours that is called without the dispatcher, which would show
// it.  `name` is a literal; `arguments()` gives its c10::IValues, the first one
// being what it writes.
class OperatorRange {
 public:
  template <typename Arguments>
  OperatorRange(const char* name, Arguments arguments)
      : range_(at::RecordScope::FUNCTION) {
    if (!range_.isActive()) return;
    if (range_.needsInputs()) {
      arguments_ = arguments();
      range_.before(name, c10::ArrayRef<const c10::IValue>(arguments_.data(),
                                                           arguments_.size()));
    } else {
      range_.before(name);
    }
  }

 private:
  std::vector<c10::IValue> arguments_;
  at::RecordFunction range_;
};

}  // namespace lowtide::base
