// Calls of operators, as dispatch modes see them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "activation/lineage.h"

namespace lowtide::python {

// Hash of a call before it runs: its operator, where its tensors come from, the
// values of its other arguments, the types of what has none.  Parameters among
// the arguments are `given` to the lineage.
std::uint64_t key_of(activation::Lineage& lineage, pybind11::handle operator_,
                     const pybind11::tuple& args, const pybind11::dict& kwargs);

}  // namespace lowtide::python
