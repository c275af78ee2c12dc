#include "python/gather_hooks.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>

#include "python/hook_functions.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

using gather::SavedValue;
using gather::SavedValues;
using SavedValuesPtr = std::shared_ptr<SavedValues>;

PyObject* pack(PyObject* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return capsule_of(
             value_of<SavedValuesPtr>(self)->pack(THPVariable_Unpack(tensor)))
      .release()
      .ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject* /*self*/, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const auto& saved = value_of<SavedValue>(capsule);
  at::Tensor tensor;
  {
    const py::gil_scoped_release no_gil;
    tensor = saved.unpack();
  }
  return THPVariable_Wrap(tensor);
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_def = {"pack", &pack, METH_O, nullptr};
PyMethodDef unpack_def = {"unpack", &unpack, METH_O, nullptr};

// The active pack function; null if there is none.
py::object active_pack() {
  if (!at::SavedTensorDefaultHooks::is_enabled()) return {};
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
  if (!hooks) return {};
  return py::reinterpret_borrow<py::object>(
      hooks->first.ptr(getPyInterpreter()));
}

bool is_ours(const py::object& function) {
  return PyCFunction_Check(function.ptr()) != 0 &&
         PyCFunction_GET_FUNCTION(function.ptr()) == &pack;
}

}  // namespace

ActiveHooks active_hooks() {
  const py::object function = active_pack();
  if (!function) return ActiveHooks::none;
  return is_ours(function) ? ActiveHooks::ours : ActiveHooks::foreign;
}

SavedValuesPtr active_saved_values() {
  const py::object function = active_pack();
  if (!function || !is_ours(function)) return nullptr;
  return value_of<SavedValuesPtr>(PyCFunction_GET_SELF(function.ptr()));
}

void push_gather_hooks() {
  const py::object self = capsule_of(
      std::make_unique<SavedValuesPtr>(std::make_shared<SavedValues>()));
  push_hooks(function_of(&pack_def, self.ptr()),
             function_of(&unpack_def, nullptr));
}

void pop_gather_hooks() { at::SavedTensorDefaultHooks::pop_hooks(); }

}  // namespace lowtide::python
