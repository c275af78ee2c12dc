// How an operator's output type follows from its inputs', on one axis: a pure
// function of numbers.
//
// No torch header: extensions include this through register_rule.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "spmd/type.h"

namespace lowtide::spmd {

enum class RuleKind : std::uint8_t {
  local,        // does not communicate; not linear
  linear,       // jointly linear in all inputs: sums, views, concatenations
  multilinear,  // linear in each input alone: products
  affine,       // product of the others, plus input `index` if it is there
  quotient,     // linear in input 0 only
  collective,   // communicates: input 0 goes from src to dst
  same_as,      // as input `index`, on its author's word
  constant,     // the same on all ranks whatever the inputs: shapes, zeros
  random,       // draws numbers: every rank its own
  host,         // gives a Python number, which must be the same on all ranks
};
inline constexpr std::size_t kNumRuleKinds = 10;

struct Rule {
  RuleKind kind = RuleKind::local;
  std::int64_t index = 0;  // of a tensor input: same_as, affine
  Type src = Type::R;      // collective
  Type dst = Type::R;

  friend bool operator==(const Rule&, const Rule&) = default;
};

inline constexpr Rule LOCAL{RuleKind::local};
inline constexpr Rule LINEAR{RuleKind::linear};
inline constexpr Rule MULTILINEAR{RuleKind::multilinear};
constexpr Rule SAME_AS(std::int64_t index) {
  return {RuleKind::same_as, index};
}
// Pairs with a collective: P -> R, P -> I, P -> V, V -> R, V -> I, V -> V.
// Throws lowtide::InvalidArgument for another.
Rule COLLECTIVE(Type src, Type dst);

std::string describe(const Rule& rule);  // "LOCAL", "COLLECTIVE(P, R)", ...

struct Operand {
  Type type = Type::R;
  // Without a gradient R and I are the same.
  bool needs_gradient = true;
};

enum class Problem : std::uint8_t {
  none,
  partial_not_linear,  // P into something that is not linear
  partial_and_other,   // P beside what is not P in a sum, or beside V
  two_partials,        // P times P
  invariant_mixed,     // I beside R, V or P
  other_source,        // input 0 of a collective is not of its src
  no_such_input,       // SAME_AS index beyond the inputs
  differs_by_rank,     // V or P becomes a Python number
};

struct Inference {
  std::optional<Type> type;  // none exactly where there is a problem
  Problem problem = Problem::none;
};

Inference infer(const Rule& rule, const std::vector<Operand>& operands);

// "a partial sum passes linear operators only", and what to write.
std::string_view problem_text(Problem problem);
std::string remedy(Problem problem, const std::string& axis);

}  // namespace lowtide::spmd
