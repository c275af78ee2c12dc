#include "spmd/transition.h"

#include "base/check.h"

namespace lowtide::spmd {
namespace {

constexpr std::string_view kOperationNames[kNumOperations] = {
    "all_gather", "reduce_scatter", "all_reduce",
    "all_to_all", "convert",        "reinterpret"};

std::string pairs_of(Operation operation) {
  std::string pairs;
  for (const Transition& each : kTransitions) {
    if (each.forward.operation != operation) continue;
    pairs +=
        base::concat(pairs.empty() ? "" : ", ", type_name(each.forward.src),
                     " -> ", type_name(each.forward.dst));
  }
  return pairs;
}

}  // namespace

std::string_view operation_name(Operation operation) {
  return kOperationNames[static_cast<std::size_t>(operation)];
}

std::optional<Operation> operation_named(std::string_view name) {
  for (std::size_t i = 0; i < kNumOperations; ++i) {
    if (kOperationNames[i] == name) return static_cast<Operation>(i);
  }
  return std::nullopt;
}

const Transition& transition(Operation operation, Type src, Type dst) {
  for (const Transition& each : kTransitions) {
    if (each.forward == Step{operation, src, dst}) return each;
  }
  throw InvalidArgument(
      base::error_text(std::string(operation_name(operation)),
                       base::concat("one of ", pairs_of(operation)),
                       base::concat(type_name(src), " -> ", type_name(dst)),
                       "docs/replication_rules.md has the table."));
}

std::optional<comm::Kind> wire_kind(Operation operation) {
  switch (operation) {
    case Operation::all_gather:
      return comm::Kind::all_gather;
    case Operation::reduce_scatter:
      return comm::Kind::reduce_scatter;
    case Operation::all_reduce:
      return comm::Kind::all_reduce;
    case Operation::all_to_all:
      return comm::Kind::all_to_all;
    case Operation::convert:
    case Operation::reinterpret:
      return std::nullopt;
  }
  LOWTIDE_INVARIANT(false, "an operation has a kind");
}

std::optional<comm::Kind> backward_kind(Type src, Type dst) {
  for (const Transition& each : kTransitions) {
    if (each.forward.src == src && each.forward.dst == dst &&
        wire_kind(each.forward.operation)) {
      return wire_kind(each.backward.operation);
    }
  }
  LOWTIDE_INVARIANT(false, "a collective's types are in the table");
}

std::optional<comm::Kind> gradient_kind(Type from, Type to) {
  const bool replica = is_replica(to);
  if (from == to || (is_replica(from) && (replica || to == Type::V))) {
    return std::nullopt;
  }
  if (from == Type::P) {
    return replica ? comm::Kind::all_reduce : comm::Kind::reduce_scatter;
  }
  if (from == Type::V && replica) return comm::Kind::all_gather;
  throw InvalidArgument(base::error_text(
      "grad_types", "a type that a collective can make of the gradient",
      base::concat(type_name(to), " for a gradient of type ", type_name(from)),
      base::concat("Leave it out, or declare ", type_name(from), ".")));
}

}  // namespace lowtide::spmd
