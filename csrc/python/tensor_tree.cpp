#include "python/tensor_tree.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "python/plain_value.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

py::object wrap(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

py::object map_tuple(py::handle tree, const TensorMap& map) {
  const Py_ssize_t size = PyTuple_GET_SIZE(tree.ptr());
  std::vector<py::object> items;
  items.reserve(static_cast<std::size_t>(size));
  bool changed = false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyTuple_GET_ITEM(tree.ptr(), i);
    items.push_back(map_tensors(item, map));
    changed |= items.back().ptr() != item;
  }
  if (!changed) {
    return py::reinterpret_borrow<py::object>(tree);
  }
  py::tuple mapped(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    mapped[static_cast<std::size_t>(i)] =
        std::move(items[static_cast<std::size_t>(i)]);
  }
  return mapped;
}

py::object map_list(py::handle tree, const TensorMap& map) {
  const auto items = py::reinterpret_borrow<py::list>(tree);
  py::list mapped(items.size());
  bool changed = false;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const py::object item = items[i];
    py::object result = map_tensors(item, map);
    changed |= !result.is(item);
    mapped[i] = std::move(result);
  }
  return changed ? py::object(std::move(mapped))
                 : py::reinterpret_borrow<py::object>(tree);
}

py::object map_dict(py::handle tree, const TensorMap& map) {
  py::dict mapped;
  bool changed = false;
  for (const auto item : py::reinterpret_borrow<py::dict>(tree)) {
    py::object result = map_tensors(item.second, map);
    changed |= !result.is(item.second);
    mapped[item.first] = std::move(result);
  }
  return changed ? py::object(std::move(mapped))
                 : py::reinterpret_borrow<py::object>(tree);
}

}  // namespace

py::object map_tensors(py::handle tree, const TensorMap& map) {
  PyObject* object = tree.ptr();
  if (THPVariable_Check(object)) {
    const auto& tensor = THPVariable_Unpack(object);
    auto mapped = map(tensor);
    return mapped.is_same(tensor) ? py::reinterpret_borrow<py::object>(tree)
                                  : wrap(mapped);
  }
  if (is_plain(object)) return py::reinterpret_borrow<py::object>(tree);
  if (PyTuple_CheckExact(object)) return map_tuple(tree, map);
  if (PyList_CheckExact(object)) return map_list(tree, map);
  if (PyDict_CheckExact(object)) return map_dict(tree, map);
  const auto apply =
      py::module_::import("torch.distributed.utils").attr("_apply_to_tensors");
  return apply(py::cpp_function([&map](const py::object& leaf) {
                 return map_tensors(leaf, map);
               }),
               tree);
}

std::vector<at::Tensor> tensors_requiring_grad(py::handle tree) {
  std::vector<at::Tensor> found;
  const std::function<void(py::handle)> visit = [&](py::handle node) {
    PyObject* object = node.ptr();
    if (THPVariable_Check(object)) {
      const auto& tensor = THPVariable_Unpack(object);
      if (tensor.requires_grad()) {
        found.push_back(tensor);
      }
    } else if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
      for (const auto item : node) visit(item);
    } else if (PyDict_CheckExact(object)) {
      for (const auto item : py::reinterpret_borrow<py::dict>(node)) {
        visit(item.second);
      }
    } else if (!is_plain(object)) {
      const auto leaves =
          py::module_::import("torch.utils._pytree").attr("tree_leaves")(node);
      for (const auto leaf : leaves) {
        if (THPVariable_Check(leaf.ptr())) visit(leaf);
      }
    }
  };
  visit(tree);
  return found;
}

}  // namespace lowtide::python
