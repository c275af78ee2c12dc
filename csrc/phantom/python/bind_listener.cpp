// Binding of csrc/phantom/device/allocation_listener.h, no logic.
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "phantom/device/allocation_listener.h"
#include "phantom/python/bindings.h"

namespace py = pybind11;

namespace lowtide::phantom::python {
namespace {

// The listener may die on a thread without the GIL.
std::shared_ptr<py::object> shared(py::object object) {
  return {std::make_unique<py::object>(std::move(object)).release(),
          [](py::object* pointer) {
            const std::unique_ptr<py::object> owned(pointer);
            const py::gil_scoped_acquire gil;
            owned->release().dec_ref();
          }};
}

void listen(py::object callback) {
  AllocationListener listener;
  if (!callback.is_none()) {
    listener = [call = shared(std::move(callback))](const Allocation& made) {
      const py::gil_scoped_acquire gil;
      (*call)(made.address, made.bytes, made.stream, made.operator_name);
    };
  }
  set_allocation_listener(std::move(listener));
}

}  // namespace

void bind_listener(py::module_& module) {
  module.def("set_allocation_listener", &listen,
             py::arg("listener").none(true));
}

}  // namespace lowtide::phantom::python
