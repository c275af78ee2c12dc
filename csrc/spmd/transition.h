// The typed collectives and conversions: which pairs of types each takes, what
// it sends, and what its backward is.  A pure table.
//
// `convert` keeps the meaning of a value (a slice of what is replicated, zeros
// beside a slice), `reinterpret` keeps its bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/collectives.h"
#include "spmd/type.h"

namespace lowtide::spmd {

enum class Operation : std::uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  all_to_all,
  convert,
  reinterpret,
};
inline constexpr std::size_t kNumOperations = 6;

struct Step {
  Operation operation;
  Type src;
  Type dst;

  friend bool operator==(const Step&, const Step&) = default;
};

struct Transition {
  Step forward;
  Step backward;  // from the gradient of dst to the gradient of src
};

// Every transition there is.
inline constexpr std::array<Transition, 16> kTransitions = {{
    {{Operation::all_gather, Type::V, Type::R},
     {Operation::reduce_scatter, Type::P, Type::V}},
    {{Operation::all_gather, Type::V, Type::I},
     {Operation::convert, Type::I, Type::V}},
    {{Operation::reduce_scatter, Type::P, Type::V},
     {Operation::all_gather, Type::V, Type::R}},
    {{Operation::all_reduce, Type::P, Type::R},
     {Operation::all_reduce, Type::P, Type::R}},
    {{Operation::all_reduce, Type::P, Type::I},
     {Operation::convert, Type::I, Type::R}},
    {{Operation::all_to_all, Type::V, Type::V},
     {Operation::all_to_all, Type::V, Type::V}},
    {{Operation::convert, Type::I, Type::R},
     {Operation::all_reduce, Type::P, Type::I}},
    {{Operation::convert, Type::R, Type::I},
     {Operation::convert, Type::I, Type::P}},
    {{Operation::convert, Type::I, Type::V},
     {Operation::all_gather, Type::V, Type::I}},
    {{Operation::convert, Type::R, Type::V},
     {Operation::convert, Type::V, Type::P}},
    {{Operation::convert, Type::V, Type::P},
     {Operation::convert, Type::R, Type::V}},
    {{Operation::convert, Type::R, Type::P},
     {Operation::convert, Type::R, Type::P}},
    {{Operation::convert, Type::I, Type::P},
     {Operation::convert, Type::R, Type::I}},
    {{Operation::reinterpret, Type::R, Type::V},
     {Operation::reinterpret, Type::V, Type::P}},
    {{Operation::reinterpret, Type::V, Type::P},
     {Operation::reinterpret, Type::R, Type::V}},
    {{Operation::reinterpret, Type::R, Type::P},
     {Operation::reinterpret, Type::R, Type::P}},
}};

std::string_view operation_name(Operation operation);  // "all_gather", ...
std::optional<Operation> operation_named(std::string_view name);

// Throws lowtide::InvalidArgument with the pairs `operation` takes.
const Transition& transition(Operation operation, Type src, Type dst);

// What goes over the wire, if anything does.
std::optional<comm::Kind> wire_kind(Operation operation);

// The collective that an operator of rule COLLECTIVE(src, dst) needs in its
// backward; none where that is local.
std::optional<comm::Kind> backward_kind(Type src, Type dst);

// What turns a gradient of type `from` into one of type `to`; nothing if it is
// local.  Throws lowtide::InvalidArgument where there is no such collective.
std::optional<comm::Kind> gradient_kind(Type from, Type to);

}  // namespace lowtide::spmd
