// Walks the tensors in a module's arguments or outputs.  Tensors, tuples,
// lists and dicts are walked here; anything else that may hold tensors
// (dataclasses, named tuples, registered pytree nodes) through torch's own
// Python helpers, so that lowtide accepts what FSDP2 accepts.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <vector>

namespace lowtide::python {

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

// `tree` with every tensor replaced by `map(tensor)`; the very same object
// where nothing changed.  Containers are rebuilt, never written to.
pybind11::object map_tensors(pybind11::handle tree, const TensorMap& map);

// The tensors of `tree` that require grad, in walking order.
std::vector<at::Tensor> tensors_requiring_grad(pybind11::handle tree);

}  // namespace lowtide::python
