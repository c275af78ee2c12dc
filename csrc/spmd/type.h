// What a value is along one axis of a mesh.
//
//   R  replicated: equal on all ranks; each rank's gradient is a part of it (P)
//   I  invariant: equal on all ranks, and so is its gradient (I)
//   V  varying: every rank has its own value, and its own gradient (V)
//   P  partial: the value is the sum over ranks; its gradient is equal (R)
//
// `constant` is the engine's: a number or a tensor made without tensors, equal
// on all ranks and without a gradient.
//
// No torch header: extensions include this through register_rule.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace lowtide::spmd {

enum class Type : std::uint8_t { R, I, V, P, constant };
inline constexpr std::size_t kNumTypes = 5;

// Type of the gradient; a constant's is `constant`.
constexpr Type gradient_of(Type type) {
  if (type == Type::R) return Type::P;
  if (type == Type::P) return Type::R;
  return type;
}

// Equal bytes on all ranks.
constexpr bool is_replica(Type type) {
  return type == Type::R || type == Type::I || type == Type::constant;
}

std::string_view type_name(Type type);  // "R", ..., "constant"
std::optional<Type> type_named(std::string_view name);

}  // namespace lowtide::spmd
