// Saved-tensor hooks that are built-in functions over capsules: torch only
// takes Python callables, and frames of Python would cost more than all the
// rest.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

namespace lowtide::python {

inline constexpr const char* kCapsule = "lowtide.saved_tensor";

// The capsule owns `value`.
template <typename Value>
pybind11::object capsule_of(std::unique_ptr<Value> value) {
  PyObject* const capsule =
      PyCapsule_New(value.get(), kCapsule, [](PyObject* self) {
        const std::unique_ptr<Value> owned(
            static_cast<Value*>(PyCapsule_GetPointer(self, kCapsule)));
      });
  if (capsule == nullptr) throw pybind11::error_already_set();
  value.release();
  return pybind11::reinterpret_steal<pybind11::object>(capsule);
}

template <typename Value>
Value& value_of(PyObject* capsule) {
  return *static_cast<Value*>(PyCapsule_GetPointer(capsule, kCapsule));
}

inline pybind11::object function_of(PyMethodDef* definition, PyObject* self) {
  return pybind11::reinterpret_steal<pybind11::object>(
      PyCFunction_New(definition, self));
}

inline void push_hooks(const pybind11::object& pack,
                       const pybind11::object& unpack) {
  at::SavedTensorDefaultHooks::lazy_initialize();
  const auto safe = [](pybind11::object function) {
    return c10::SafePyObject(function.release().ptr(), getPyInterpreter());
  };
  at::SavedTensorDefaultHooks::push_hooks(safe(pack), safe(unpack));
}

}  // namespace lowtide::python
