// Bindings of csrc/phantom/device.
#include "phantom/python/bindings.h"

namespace lowtide::phantom::python {

void bind_device(pybind11::module_&) {}

}  // namespace lowtide::phantom::python
