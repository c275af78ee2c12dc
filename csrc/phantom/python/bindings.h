// What module.cpp calls to fill lowtide._phantom.
#pragma once

#include <pybind11/pybind11.h>

namespace lowtide::phantom::python {

void bind_allocator(pybind11::module_& module);  // AllocatorModel
void bind_device(pybind11::module_& module);     // the PrivateUse1 device
void bind_listener(pybind11::module_& module);
void bind_time(pybind11::module_& module);

}  // namespace lowtide::phantom::python
