// Bindings of csrc/phantom/allocator, no logic.
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "base/check.h"
#include "phantom/allocator/caching_allocator.h"
#include "phantom/python/bindings.h"
#include "phantom/python/convert.h"

namespace py = pybind11;

namespace lowtide::phantom::python {
namespace {

std::unique_ptr<EventSource> events_named(const std::string& name) {
  if (name == "immediate") return immediate_events();
  if (name == "at_sync") return at_sync_events();
  throw InvalidArgument(base::error_text(
      "allocator events", "\"immediate\" or \"at_sync\"", '"' + name + '"',
      "Immediate gives the lower bound of what is reserved, at_sync the "
      "upper."));
}

// torch.OutOfMemoryError is a torch class, found when it is first needed so
// that this module can be bound without libtorch_python's headers.
void throw_as_python_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const OutOfMemory& error) {
      const py::object type =
          py::module_::import("torch").attr("OutOfMemoryError");
      PyErr_SetString(type.ptr(), error.what());
    }
  });
}

}  // namespace

void bind_allocator(py::module_& module) {
  throw_as_python_errors();

  py::class_<AllocatorSettings>(module, "AllocatorSettings",
                                "Settings of PYTORCH_ALLOC_CONF, in bytes.")
      .def(py::init<>())
      .def_readwrite("expandable", &AllocatorSettings::expandable)
      .def_readwrite("capacity", &AllocatorSettings::capacity)
      .def_readwrite("memory_fraction", &AllocatorSettings::memory_fraction)
      .def_readwrite("garbage_collection_threshold",
                     &AllocatorSettings::garbage_collection_threshold)
      .def_readwrite("max_split", &AllocatorSettings::max_split)
      .def_readwrite("max_non_split_rounding",
                     &AllocatorSettings::max_non_split_rounding)
      .def_readwrite("large_segment", &AllocatorSettings::large_segment)
      .def_readwrite("roundup_power2_divisions",
                     &AllocatorSettings::roundup_power2_divisions);

  py::class_<CachingAllocator>(module, "CachingAllocator",
                               "The model alone; lowtide.phantom has its face.")
      .def(py::init([](const AllocatorSettings& settings,
                       const std::string& events) {
             return std::make_unique<CachingAllocator>(settings,
                                                       events_named(events));
           }),
           py::arg("settings"), py::arg("events"))
      .def("malloc", &CachingAllocator::malloc, py::arg("num_bytes"),
           py::arg("stream"))
      .def("free", &CachingAllocator::free, py::arg("address"))
      .def("record_stream", &CachingAllocator::record_stream,
           py::arg("address"), py::arg("stream"))
      .def("synchronize", &CachingAllocator::synchronize, py::arg("stream"))
      .def("empty_cache", &CachingAllocator::empty_cache)
      .def("settings", &CachingAllocator::settings)
      .def("set_expandable", &CachingAllocator::set_expandable,
           py::arg("expandable"))
      .def("set_memory_fraction", &CachingAllocator::set_memory_fraction,
           py::arg("fraction"))
      .def("allocated", &CachingAllocator::allocated)
      .def("reserved", &CachingAllocator::reserved)
      .def("block_size", &CachingAllocator::block_size, py::arg("address"))
      .def(
          "statistics",
          [](const CachingAllocator& a) { return to_dict(a.statistics()); },
          "torch.cuda.memory_stats_as_nested_dict().")
      .def("reset_peak_statistics", &CachingAllocator::reset_peak_statistics)
      .def("reset_accumulated_statistics",
           &CachingAllocator::reset_accumulated_statistics)
      .def(
          "snapshot",
          [](const CachingAllocator& a) { return to_list(a.snapshot()); },
          "torch.cuda.memory_snapshot() without call stacks.")
      .def("record_history", &CachingAllocator::record_history,
           py::arg("max_entries"))
      .def(
          "history",
          [](const CachingAllocator& a) { return to_list(a.history()); },
          "(action, address, bytes, stream) per entry.");
}

}  // namespace lowtide::phantom::python
