// Values that never hold a tensor: what most other arguments of a call are.
#pragma once

#include <pybind11/pybind11.h>

namespace lowtide::python {

inline bool is_plain(PyObject* object) {
  return object == Py_None || PyLong_Check(object) || PyFloat_Check(object) ||
         PyUnicode_Check(object);
}

}  // namespace lowtide::python
