// For extensions: the replication rule of an operator, beside its TORCH_LIBRARY
// definition.
//
//   TORCH_LIBRARY(my, m) { m.def("gelu(Tensor x) -> Tensor"); }
//   LOWTIDE_REPLICATION_RULE("my::gelu", lowtide::spmd::LOCAL);
//
// Include directory and library: lowtide.spmd.cpp_paths().  The rule is there
// once the extension is loaded, before or after lowtide.
#pragma once

#include <string>

#include "spmd/rule.h"

namespace lowtide::spmd {

// `op` is "namespace::name", or "namespace::name.overload" for one overload.
// Later rules replace earlier ones.  Any thread.
void register_rule(const std::string& op, const Rule& rule);

struct RuleRegistration {
  RuleRegistration(const char* op, const Rule& rule) {
    register_rule(op, rule);
  }
};

}  // namespace lowtide::spmd

#define LOWTIDE_RULE_JOIN_(a, b) a##b
#define LOWTIDE_RULE_NAME_(line) LOWTIDE_RULE_JOIN_(lowtide_rule_, line)
#define LOWTIDE_REPLICATION_RULE(op, ...)                            \
  static const ::lowtide::spmd::RuleRegistration LOWTIDE_RULE_NAME_( \
      __LINE__) {                                                    \
    op, __VA_ARGS__                                                  \
  }
