// Rules by operator name.  Thread-safe.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "spmd/rule.h"

namespace lowtide::spmd {

class RuleBook {
 public:
  // With the rules of aten and of lowtide's own operators.
  RuleBook();

  void set(const std::string& name, const Rule& rule);
  // "ns::op.overload" falls back on "ns::op", and an in-place "op_" on "op".
  std::optional<Rule> find(const std::string& name) const;
  // In the order of the alphabet.
  std::vector<std::string> names() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Rule> rules_;
};

// The process's, as operators are the process's.
RuleBook& rule_book();

}  // namespace lowtide::spmd
