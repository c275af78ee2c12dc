// Bindings of csrc/phantom/allocator.
#include "phantom/python/bindings.h"

namespace lowtide::phantom::python {

void bind_allocator(pybind11::module_&) {}

}  // namespace lowtide::phantom::python
