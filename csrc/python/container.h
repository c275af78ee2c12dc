// The containers in a call's arguments and outputs that are walked in C++:
// tuples, lists and dicts of exactly these types.  Whatever else may hold
// tensors is left to torch's own Python helpers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace lowtide::python {

enum class TreeKind : std::uint8_t {
  tensor,
  plain,  // never holds a tensor: what most other arguments of a call are
  tuple,
  list,
  dict,
  other
};

TreeKind kind_of(PyObject* object);

// What a tuple, a list or a dict holds; a dict's values in its order.
std::vector<pybind11::object> items_of(pybind11::handle container,
                                       TreeKind kind);

// A new container of `kind` with these items; `keys`: a dict's, in its order,
// which may be the dict itself.
pybind11::object container_of(TreeKind kind, pybind11::handle keys,
                              std::vector<pybind11::object> items);

}  // namespace lowtide::python
