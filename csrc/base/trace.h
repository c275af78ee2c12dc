// Ranges that torch's profilers show: "lowtide::gather (layers.3)".
#pragma once

#include <ATen/record_function.h>

#include <string>

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

}  // namespace lowtide::base
