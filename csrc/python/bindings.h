// What module.cpp calls to fill lowtide._C; one function per room.
#pragma once

#include <pybind11/pybind11.h>

namespace lowtide::python {

void bind_memory(pybind11::module_& module);      // Ledger, AllocationTimeline
void bind_comm(pybind11::module_& module);        // Collectives
void bind_shard(pybind11::module_& module);       // needs the two above
void bind_activation(pybind11::module_& module);  // needs bind_shard's memory
void bind_gather(pybind11::module_& module);      // likewise
void bind_spmd(pybind11::module_& module);        // needs bind_comm

}  // namespace lowtide::python
