#include "python/argument_tree.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace py = pybind11;

namespace lowtide::python {

ArgumentTree::ArgumentTree(py::handle tree, std::vector<at::Tensor>& tensors) {
  read(tree, tensors);
}

void ArgumentTree::read(py::handle tree, std::vector<at::Tensor>& tensors) {
  const auto kind = kind_of(tree.ptr());
  switch (kind) {
    case TreeKind::tensor:
      kind_ = kind;
      tensor_ = tensors.size();
      tensors.push_back(THPVariable_Unpack(tree.ptr()));
      return;
    case TreeKind::plain:
      object_ = py::reinterpret_borrow<py::object>(tree);
      return;
    case TreeKind::dict:
      object_ = py::reinterpret_steal<py::object>(PyDict_Keys(tree.ptr()));
      [[fallthrough]];
    case TreeKind::tuple:
    case TreeKind::list:
      read_items(tree, kind, tensors);
      return;
    case TreeKind::other:
      read_pytree(tree, tensors);
  }
}

void ArgumentTree::read_items(py::handle items, TreeKind kind,
                              std::vector<at::Tensor>& tensors) {
  kind_ = kind;
  for (const auto& item : items_of(items, kind)) {
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
  read_items(leaves, TreeKind::list, tensors);
  kind_ = TreeKind::other;
  object_ = flat[1];
}

py::object ArgumentTree::with(const std::vector<at::Tensor>& tensors) const {
  if (kind_ == TreeKind::plain) return object_;
  if (kind_ == TreeKind::tensor) {
    return py::reinterpret_steal<py::object>(
        THPVariable_Wrap(tensors.at(tensor_)));
  }
  std::vector<py::object> items;
  items.reserve(children_.size());
  for (const auto& child : children_) items.push_back(child.with(tensors));
  auto container = container_of(kind_, object_, std::move(items));
  if (kind_ != TreeKind::other) return container;
  const auto unflatten =
      py::module_::import("torch.utils._pytree").attr("tree_unflatten");
  return unflatten(container, object_);
}

}  // namespace lowtide::python
