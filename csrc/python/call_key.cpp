#include "python/call_key.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

#include <bit>

namespace py = pybind11;

namespace lowtide::python {
namespace {

using activation::combine;
using activation::Lineage;

// Told apart from other values of the same bits.
enum class ValueKind : std::uint64_t {
  tensor,
  several,
  integer,
  real,
  other,
  type
};

// The metaclass's answer takes long, and most tensors are no parameters.
bool is_parameter(PyObject* tensor) {
  if (THPVariable_CheckExact(tensor)) {
    return reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == ParameterClass;
  }
  const int is_instance = PyObject_IsInstance(tensor, ParameterClass);
  if (is_instance < 0) throw py::error_already_set();
  return is_instance != 0;
}

bool has_value(PyObject* object) {
  return object == Py_None || PyUnicode_Check(object) ||
         PyComplex_Check(object) || THPDtype_Check(object) ||
         THPDevice_Check(object) || THPLayout_Check(object) ||
         THPMemoryFormat_Check(object);
}

std::uint64_t address(const void* of) {
  return reinterpret_cast<std::uintptr_t>(of);
}

class Key {
 public:
  Key(Lineage& lineage, py::handle operator_)
      : lineage_(lineage), hash_(address(operator_.ptr())) {}

  std::uint64_t hash() const { return hash_; }

  void add(py::handle value) {
    PyObject* const object = value.ptr();
    if (THPVariable_Check(object)) {
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (is_parameter(object)) lineage_.given(tensor);
      add(ValueKind::tensor, lineage_.of(tensor));
    } else if (PyTuple_Check(object) || PyList_Check(object)) {
      add(ValueKind::several, py::len(value));
      for (const auto item : value) add(item);
    } else if (PyLong_Check(object)) {
      add(ValueKind::integer, PyLong_AsUnsignedLongLongMask(object));
    } else if (PyFloat_Check(object)) {
      // A NaN too is the same when it comes again.
      add(ValueKind::real,
          std::bit_cast<std::uint64_t>(PyFloat_AS_DOUBLE(object)));
    } else if (has_value(object)) {
      add(ValueKind::other, static_cast<std::uint64_t>(py::hash(value)));
    } else if (THPGenerator_Check(object)) {
      add(ValueKind::other,
          address(THPGenerator_Unwrap(object).unsafeGetGeneratorImpl()));
    } else {
      add(ValueKind::type, address(Py_TYPE(object)));
    }
  }

 private:
  void add(ValueKind kind, std::uint64_t value) {
    hash_ = combine(combine(hash_, static_cast<std::uint64_t>(kind)), value);
  }

  Lineage& lineage_;
  std::uint64_t hash_;
};

}  // namespace

std::uint64_t key_of(Lineage& lineage, py::handle operator_,
                     const py::tuple& args, const py::dict& kwargs) {
  Key key(lineage, operator_);
  for (const auto argument : args) key.add(argument);
  for (const auto& [name, argument] : kwargs) {
    key.add(name);
    key.add(argument);
  }
  return key.hash();
}

}  // namespace lowtide::python
