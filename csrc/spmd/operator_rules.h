// The rules lowtide comes with: aten's common operators, and its own.
#pragma once

#include <vector>

#include "spmd/rule.h"

namespace lowtide::spmd {

struct OperatorRules {
  Rule rule;
  std::vector<const char*> names;  // "aten::add"; overloads share a rule
};

// No name is there twice.
const std::vector<OperatorRules>& operator_rules();

}  // namespace lowtide::spmd
