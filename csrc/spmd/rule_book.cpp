#include "spmd/rule_book.h"

#include "spmd/operator_rules.h"
#include "spmd/register_rule.h"

namespace lowtide::spmd {

RuleBook::RuleBook() {
  for (const OperatorRules& group : operator_rules()) {
    for (const char* name : group.names) rules_.emplace(name, group.rule);
  }
}

void RuleBook::set(const std::string& name, const Rule& rule) {
  const std::lock_guard lock(mutex_);
  rules_[name] = rule;
}

std::optional<Rule> RuleBook::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  if (const auto rule = rules_.find(name); rule != rules_.end()) {
    return rule->second;
  }
  std::string packet = name.substr(0, name.find('.'));
  if (const auto rule = rules_.find(packet); rule != rules_.end()) {
    return rule->second;
  }
  if (packet.empty() || packet.back() != '_') return std::nullopt;
  packet.pop_back();
  const auto rule = rules_.find(packet);
  return rule == rules_.end() ? std::nullopt : std::optional(rule->second);
}

std::vector<std::string> RuleBook::names() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, rule] : rules_) names.push_back(name);
  return names;
}

RuleBook& rule_book() {
  static RuleBook book;
  return book;
}

void register_rule(const std::string& op, const Rule& rule) {
  rule_book().set(op, rule);
}

}  // namespace lowtide::spmd
