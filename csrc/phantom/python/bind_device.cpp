// Bindings of csrc/phantom/device, no logic.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "phantom/device/cublas_workspace.h"
#include "phantom/device/fake_group.h"
#include "phantom/device/generator.h"
#include "phantom/device/gloo_backend.h"
#include "phantom/device/install.h"
#include "phantom/device/operator_list.h"
#include "phantom/device/phantom_device.h"
#include "phantom/python/bindings.h"

namespace py = pybind11;

namespace lowtide::phantom::python {
namespace {

Mode mode_named(const std::string& name) {
  if (name == "exact") return Mode::exact;
  if (name == "meta") return Mode::meta;
  throw InvalidArgument(base::error_text(
      "phantom mode", "\"exact\" or \"meta\"", '"' + name + '"',
      "Exact computes on the CPU, meta only counts memory."));
}

Progress progress_named(const std::string& name) {
  if (name == "immediate") return Progress::immediate;
  if (name == "at_sync") return Progress::at_sync;
  throw InvalidArgument(base::error_text(
      "phantom events", "\"immediate\" or \"at_sync\"", '"' + name + '"',
      "Immediate gives the lower bound of what is reserved, at_sync the "
      "upper."));
}

std::optional<std::string> memory_of(const std::string& name,
                                     const std::string& overload) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      name.c_str(), overload.c_str());
  const auto rule = find_rule(op);
  if (!rule) return std::nullopt;
  return std::string(name_of(rule->memory));
}

py::dict listed() {
  py::dict operators;
  for (const auto& [name, memory] : listed_operators()) {
    operators[py::str(name.data(), name.size())] = name_of(memory);
  }
  return operators;
}

}  // namespace

void bind_device(py::module_& module) {
  py::module_::import("torch._C._distributed_c10d");  // binds c10d::Backend
  py::class_<GlooBackend, c10d::Backend, c10::intrusive_ptr<GlooBackend>>(
      module, "GlooBackend", "Collectives of phantom tensors over gloo.")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo) {
             return c10::make_intrusive<GlooBackend>(std::move(gloo));
           }),
           py::arg("gloo"));
  py::class_<FakeGroup, c10d::Backend, c10::intrusive_ptr<FakeGroup>>(
      module, "FakeGroup", "torch's fake group, which tells the timeline.")
      .def(py::init([](int rank, int size, std::vector<std::int64_t> ranks) {
             return c10::make_intrusive<FakeGroup>(rank, size,
                                                   std::move(ranks));
           }),
           py::arg("rank"), py::arg("size"), py::arg("ranks"));
  module.attr("HOPPER_CUBLAS_WORKSPACE") = kHopperWorkspace;
  module.attr("CUBLASLT_WORKSPACE") = kCublasLtWorkspace;
  module.def("cublas_workspace_bytes", &cublas_workspace_bytes,
             py::arg("config"));
  module.def("clear_cublas_workspaces", &clear_cublas_workspaces,
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "install",
      [](const std::string& mode, const AllocatorSettings& settings,
         const std::string& events, std::size_t cublas_workspace,
         std::size_t cublaslt_workspace,
         std::vector<std::string> allowed_operators) {
        install({mode_named(mode), settings, progress_named(events),
                 cublas_workspace, cublaslt_workspace,
                 std::move(allowed_operators)});
      },
      py::kw_only(), py::arg("mode"), py::arg("settings"), py::arg("events"),
      py::arg("cublas_workspace"), py::arg("cublaslt_workspace"),
      py::arg("allowed_operators"), py::call_guard<py::gil_scoped_release>());
  module.def("mode",
             [] { return phantom_device().exact() ? "exact" : "meta"; });
  module.def("events", [] {
    return phantom_device().options().progress == Progress::immediate
               ? "immediate"
               : "at_sync";
  });
  module.def("default_generator", &default_generator);
  module.def(
      "device_memory", [] { return &phantom_device().memory(); },
      py::return_value_policy::reference);
  module.def("listed_operators", &listed);
  module.def("operator_memory", &memory_of, py::arg("name"),
             py::arg("overload"));
}

}  // namespace lowtide::phantom::python
