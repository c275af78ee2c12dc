#include "spmd/rule.h"

#include <algorithm>

#include "base/check.h"

namespace lowtide::spmd {
namespace {

Inference is(Type type) { return {type, Problem::none}; }
Inference fails(Problem problem) { return {std::nullopt, problem}; }

struct Kinds {
  std::int64_t replicated = 0, invariant = 0, varying = 0, partial = 0,
               constant = 0;

  void add(Type type) {
    if (type == Type::R) ++replicated;
    if (type == Type::I) ++invariant;
    if (type == Type::V) ++varying;
    if (type == Type::P) ++partial;
    if (type == Type::constant) ++constant;
  }
  bool invariant_is_mixed() const {
    return invariant > 0 && replicated + varying + partial > 0;
  }
};

Kinds count(const std::vector<Operand>& operands) {
  Kinds kinds;
  for (const Operand& operand : operands) kinds.add(operand.type);
  if (!kinds.invariant_is_mixed()) return kinds;
  // What has no gradient is R and I alike, so it follows the others.
  Kinds others;
  for (const Operand& operand : operands) {
    const bool either = operand.type == Type::R || operand.type == Type::I;
    others.add(either && !operand.needs_gradient ? Type::constant
                                                 : operand.type);
  }
  const bool only_constants =
      others.constant == static_cast<std::int64_t>(operands.size());
  if (only_constants) others.replicated = 1;
  return others;
}

// How P may be there, beside what the caller counted.
enum class Partials { never, all, one };

Inference combine(const Kinds& kinds, Partials allowed) {
  if (kinds.invariant_is_mixed()) return fails(Problem::invariant_mixed);
  if (kinds.partial > 0) {
    if (allowed == Partials::never) return fails(Problem::partial_not_linear);
    if (kinds.varying > 0) return fails(Problem::partial_and_other);
    if (allowed == Partials::one) {
      return kinds.partial > 1 ? fails(Problem::two_partials) : is(Type::P);
    }
    return kinds.replicated + kinds.constant > 0
               ? fails(Problem::partial_and_other)
               : is(Type::P);
  }
  if (kinds.varying > 0) return is(Type::V);
  if (kinds.invariant > 0) return is(Type::I);
  if (kinds.replicated > 0) return is(Type::R);
  return is(Type::constant);
}

Inference affine(std::size_t index, std::vector<Operand> operands) {
  if (index >= operands.size()) return combine(count(operands), Partials::one);
  const Operand addend = operands[index];
  operands.erase(operands.begin() + static_cast<std::ptrdiff_t>(index));
  const Inference product = combine(count(operands), Partials::one);
  if (!product.type) return product;
  const bool needs_gradient = std::any_of(
      operands.begin(), operands.end(),
      [](const Operand& operand) { return operand.needs_gradient; });
  return combine(count({{*product.type, needs_gradient}, addend}),
                 Partials::all);
}

Inference quotient(const std::vector<Operand>& operands) {
  for (std::size_t i = 1; i < operands.size(); ++i) {
    if (operands[i].type == Type::P) return fails(Problem::partial_not_linear);
  }
  return combine(count(operands), Partials::one);
}

Inference collective(const Rule& rule, std::vector<Operand> operands) {
  if (operands.empty()) return fails(Problem::no_such_input);
  if (operands[0].type != rule.src) return fails(Problem::other_source);
  operands[0].type = rule.dst;
  return combine(count(operands), Partials::one);
}

}  // namespace

Rule COLLECTIVE(Type src, Type dst) {
  const bool from_partial = src == Type::P && dst != Type::P;
  const bool from_varying = src == Type::V && dst != Type::P;
  if ((!from_partial && !from_varying) || dst == Type::constant) {
    throw InvalidArgument(base::error_text(
        "COLLECTIVE", "one of (P, R), (P, I), (P, V), (V, R), (V, I), (V, V)",
        base::concat("(", type_name(src), ", ", type_name(dst), ")"),
        "What does not communicate is LOCAL, LINEAR, MULTILINEAR or "
        "SAME_AS(i)."));
  }
  return {RuleKind::collective, 0, src, dst};
}

std::string describe(const Rule& rule) {
  switch (rule.kind) {
    case RuleKind::local:
      return "LOCAL";
    case RuleKind::linear:
      return "LINEAR";
    case RuleKind::multilinear:
      return "MULTILINEAR";
    case RuleKind::affine:
      return base::concat("AFFINE(", rule.index, ")");
    case RuleKind::quotient:
      return "QUOTIENT";
    case RuleKind::collective:
      return base::concat("COLLECTIVE(", type_name(rule.src), ", ",
                          type_name(rule.dst), ")");
    case RuleKind::same_as:
      return base::concat("SAME_AS(", rule.index, ")");
    case RuleKind::constant:
      return "CONSTANT";
    case RuleKind::random:
      return "RANDOM";
    case RuleKind::host:
      return "HOST";
  }
  LOWTIDE_INVARIANT(false, "a rule has a kind");
}

Inference infer(const Rule& rule, const std::vector<Operand>& operands) {
  const auto index = static_cast<std::size_t>(rule.index);
  switch (rule.kind) {
    case RuleKind::local:
      return combine(count(operands), Partials::never);
    case RuleKind::linear:
      return combine(count(operands), Partials::all);
    case RuleKind::multilinear:
      return combine(count(operands), Partials::one);
    case RuleKind::affine:
      return affine(index, operands);
    case RuleKind::quotient:
      return quotient(operands);
    case RuleKind::collective:
      return collective(rule, operands);
    case RuleKind::same_as:
      return index < operands.size() ? is(operands[index].type)
                                     : fails(Problem::no_such_input);
    case RuleKind::constant:
      return is(Type::constant);
    case RuleKind::random: {
      const Inference local = combine(count(operands), Partials::never);
      if (!local.type) return local;
      // Its gradient differs by rank, which an invariant value's must not.
      if (local.type == Type::I) return fails(Problem::invariant_mixed);
      return is(Type::V);
    }
    case RuleKind::host: {
      const Kinds kinds = count(operands);
      return kinds.varying + kinds.partial > 0 ? fails(Problem::differs_by_rank)
                                               : is(Type::constant);
    }
  }
  LOWTIDE_INVARIANT(false, "a rule has a kind");
}

std::string_view problem_text(Problem problem) {
  switch (problem) {
    case Problem::none:
      return "";
    case Problem::partial_not_linear:
      return "a partial sum (P) passes linear operators only";
    case Problem::partial_and_other:
      return "a partial sum (P) is added to partial sums only, and not "
             "multiplied by varying values (V)";
    case Problem::two_partials:
      return "one factor at most is a partial sum (P)";
    case Problem::invariant_mixed:
      return "invariant values (I) meet invariant values only";
    case Problem::other_source:
      return "the collective's first input has its source type";
    case Problem::no_such_input:
      return "the rule names one of the tensor inputs";
    case Problem::differs_by_rank:
      return "a Python number is the same on all ranks";
  }
  LOWTIDE_INVARIANT(false, "a problem has a text");
}

std::string remedy(Problem problem, const std::string& axis) {
  switch (problem) {
    case Problem::none:
      return "";
    case Problem::partial_not_linear:
    case Problem::partial_and_other:
    case Problem::two_partials:
    case Problem::differs_by_rank:
      return base::concat("Reduce it first: spmd.all_reduce(x, ", axis,
                          ", src=P, dst=R), or spmd.reduce_scatter(x, ", axis,
                          ").");
    case Problem::invariant_mixed:
      return base::concat("Convert the invariant one: spmd.convert(x, ", axis,
                          ", src=I, dst=R); its backward is an all-reduce.");
    case Problem::other_source:
      return "Convert the input first, or register the rule with its type.";
    case Problem::no_such_input:
      return "Register the rule with an index below the number of tensor "
             "inputs.";
  }
  LOWTIDE_INVARIANT(false, "a problem has a remedy");
}

}  // namespace lowtide::spmd
