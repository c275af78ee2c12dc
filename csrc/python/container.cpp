#include "python/container.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace py = pybind11;

namespace lowtide::python {

TreeKind kind_of(PyObject* object) {
  if (THPVariable_Check(object)) return TreeKind::tensor;
  if (object == Py_None || PyLong_Check(object) || PyFloat_Check(object) ||
      PyUnicode_Check(object)) {
    return TreeKind::plain;
  }
  if (PyTuple_CheckExact(object)) return TreeKind::tuple;
  if (PyList_CheckExact(object)) return TreeKind::list;
  return PyDict_CheckExact(object) ? TreeKind::dict : TreeKind::other;
}

std::vector<py::object> items_of(py::handle container, TreeKind kind) {
  std::vector<py::object> items;
  items.reserve(py::len(container));
  if (kind == TreeKind::dict) {
    for (const auto item : py::reinterpret_borrow<py::dict>(container)) {
      items.push_back(py::reinterpret_borrow<py::object>(item.second));
    }
    return items;
  }
  for (const auto item : container) {
    items.push_back(py::reinterpret_borrow<py::object>(item));
  }
  return items;
}

py::object container_of(TreeKind kind, py::handle keys,
                        std::vector<py::object> items) {
  const std::size_t size = items.size();
  if (kind == TreeKind::dict) {
    py::dict dict;
    std::size_t i = 0;
    for (const auto key : keys) {
      dict[key] = std::move(items[i++]);
    }
    return dict;
  }
  if (kind == TreeKind::tuple) {
    py::tuple tuple(size);
    for (std::size_t i = 0; i < size; ++i) tuple[i] = std::move(items[i]);
    return tuple;
  }
  py::list list(size);
  for (std::size_t i = 0; i < size; ++i) list[i] = std::move(items[i]);
  return list;
}

}  // namespace lowtide::python
