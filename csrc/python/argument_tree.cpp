#include "python/argument_tree.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "python/plain_value.h"

namespace py = pybind11;

namespace lowtide::python {

ArgumentTree::ArgumentTree(py::handle tree, std::vector<at::Tensor>& tensors) {
  read(tree, tensors);
}

void ArgumentTree::read(py::handle tree, std::vector<at::Tensor>& tensors) {
  PyObject* const object = tree.ptr();
  if (THPVariable_Check(object)) {
    kind_ = Kind::tensor;
    tensor_ = tensors.size();
    tensors.push_back(THPVariable_Unpack(object));
  } else if (is_plain(object)) {
    object_ = py::reinterpret_borrow<py::object>(tree);
  } else if (PyTuple_CheckExact(object)) {
    kind_ = Kind::tuple;
    read_items(tree, tensors);
  } else if (PyList_CheckExact(object)) {
    kind_ = Kind::list;
    read_items(tree, tensors);
  } else if (PyDict_CheckExact(object)) {
    kind_ = Kind::dict;
    const auto dict = py::reinterpret_borrow<py::dict>(tree);
    if (dict.empty()) return;
    object_ = py::reinterpret_steal<py::object>(PyDict_Keys(object));
    read_items(py::reinterpret_steal<py::object>(PyDict_Values(object)),
               tensors);
  } else {
    read_pytree(tree, tensors);
  }
}

void ArgumentTree::read_items(py::handle items,
                              std::vector<at::Tensor>& tensors) {
  children_.reserve(py::len(items));
  for (const auto item : items) {
    children_.push_back(ArgumentTree(item, tensors));
  }
}

void ArgumentTree::read_pytree(py::handle tree,
                               std::vector<at::Tensor>& tensors) {
  const auto flatten =
      py::module_::import("torch.utils._pytree").attr("tree_flatten");
  const py::tuple flat = flatten(tree);
  const py::list leaves = flat[0];
  if (leaves.size() == 1 && py::object(leaves[0]).is(tree)) {
    object_ = py::reinterpret_borrow<py::object>(tree);
    return;
  }
  kind_ = Kind::pytree;
  object_ = flat[1];
  read_items(leaves, tensors);
}

py::object ArgumentTree::with(const std::vector<at::Tensor>& tensors) const {
  const std::size_t size = children_.size();
  switch (kind_) {
    case Kind::object:
      return object_;
    case Kind::tensor:
      return py::reinterpret_steal<py::object>(
          THPVariable_Wrap(tensors.at(tensor_)));
    case Kind::tuple: {
      py::tuple tuple(size);
      for (std::size_t i = 0; i < size; ++i) {
        tuple[i] = children_[i].with(tensors);
      }
      return tuple;
    }
    case Kind::dict: {
      py::dict dict;
      for (std::size_t i = 0; i < size; ++i) {
        dict[object_[py::int_(i)]] = children_[i].with(tensors);
      }
      return dict;
    }
    case Kind::list:
    case Kind::pytree:
      break;
  }
  py::list list(size);
  for (std::size_t i = 0; i < size; ++i) list[i] = children_[i].with(tensors);
  if (kind_ == Kind::list) return list;
  const auto unflatten =
      py::module_::import("torch.utils._pytree").attr("tree_unflatten");
  return unflatten(list, object_);
}

}  // namespace lowtide::python
