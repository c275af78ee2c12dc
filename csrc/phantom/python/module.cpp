// The Python module lowtide._phantom: the simulated accelerator.  Only
// `import lowtide.phantom` loads it.
#include <pybind11/pybind11.h>

#include "phantom/python/bindings.h"

PYBIND11_MODULE(_phantom, module) {
  module.doc() = "lowtide's simulated accelerator";
  lowtide::phantom::python::bind_allocator(module);
  lowtide::phantom::python::bind_device(module);
  lowtide::phantom::python::bind_listener(module);
  lowtide::phantom::python::bind_time(module);
}
