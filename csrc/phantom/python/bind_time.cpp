// Bindings of csrc/phantom/time and of the device's clock, no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "phantom/device/device_clock.h"
#include "phantom/device/phantom_device.h"
#include "phantom/python/bindings.h"
#include "phantom/time/exposure.h"
#include "phantom/time/timeline.h"

namespace py = pybind11;

namespace lowtide::phantom::python {
namespace {

std::string name_of(SpanKind kind) {
  switch (kind) {
    case SpanKind::kernel:
      return "kernel";
    case SpanKind::transfer:
      return "transfer";
    case SpanKind::collective:
      return "collective";
    case SpanKind::wait:
      return "wait";
  }
  LOWTIDE_INVARIANT(false, "a kind of span");
}

py::list spans_of(const Timeline& timeline) {
  py::list spans;
  for (const Span& span : timeline.spans()) {
    spans.append(py::make_tuple(name_of(span.kind), span.stream, span.begin,
                                span.end, span.issued, std::string(span.name),
                                span.flops, span.bytes));
  }
  return spans;
}

py::list marks_of(const Timeline& timeline) {
  py::list marks;
  for (const PhaseMark& mark : timeline.marks()) {
    marks.append(py::make_tuple(mark.phase, mark.begin));
  }
  return marks;
}

py::dict usage_of(const Timeline& timeline, double begin, double end) {
  const Usage found = usage(timeline.spans(), kDefaultStream, begin, end);
  py::dict result;
  result["seconds"] = found.seconds;
  result["compute"] = found.compute;
  result["other_kernels"] = found.other_kernels;
  result["communication"] = found.communication;
  result["exposed"] = found.exposed;
  result["other_waits"] = found.other_waits;
  result["idle"] = found.idle;
  return result;
}

void bind_machine(py::module_& module) {
  py::class_<Accelerator>(module, "Accelerator", "csrc/phantom/time/machine.h.")
      .def(py::init<>())
      .def_readwrite("peak_flops", &Accelerator::peak_flops)
      .def_readwrite("memory_bandwidth", &Accelerator::memory_bandwidth)
      .def_readwrite("product_efficiency", &Accelerator::product_efficiency)
      .def_readwrite("attention_efficiency", &Accelerator::attention_efficiency)
      .def_readwrite("memory_efficiency", &Accelerator::memory_efficiency)
      .def_readwrite("kernel_floor", &Accelerator::kernel_floor)
      .def_readwrite("host_bandwidth", &Accelerator::host_bandwidth);
  py::class_<Protocol>(module, "Protocol", "csrc/phantom/time/machine.h.")
      .def(py::init<>())
      .def_readwrite("base_latency", &Protocol::base_latency)
      .def_readwrite("hop_in_node", &Protocol::hop_in_node)
      .def_readwrite("hop_beside_network", &Protocol::hop_beside_network)
      .def_readwrite("hop_between_nodes", &Protocol::hop_between_nodes)
      .def_readwrite("share_in_node", &Protocol::share_in_node)
      .def_readwrite("share_between_nodes", &Protocol::share_between_nodes)
      .def_readwrite("most", &Protocol::most);
  py::class_<Network>(module, "Network", "csrc/phantom/time/machine.h.")
      .def(py::init<>())
      .def_readwrite("bandwidth_in_node", &Network::bandwidth_in_node)
      .def_readwrite("bandwidth_between_nodes",
                     &Network::bandwidth_between_nodes)
      .def_readwrite("ranks_per_node", &Network::ranks_per_node)
      .def_readwrite("rings", &Network::rings)
      .def_readwrite("trees", &Network::trees);
}

}  // namespace

void bind_time(py::module_& module) {
  bind_machine(module);
  py::class_<Timeline>(module, "Timeline",
                       "What a device did, and when; in seconds.")
      .def("spans", &spans_of,
           "(kind, stream, begin, end, issued, name, flops, bytes) each.")
      .def("marks", &marks_of, "(phase, begin) each.")
      .def("usage", &usage_of, py::arg("begin"), py::arg("end"));
  module.def(
      "start_timeline",
      [](const Accelerator& accelerator, const Network& network,
         double issue_cost) {
        phantom_device();  // throws without one
        device_clock().start({accelerator, network, issue_cost});
      },
      py::arg("accelerator"), py::arg("network"), py::arg("issue_cost"));
  module.def("stop_timeline", [] { return device_clock().stop(); });
  module.def(
      "mark_phase",
      [](std::string phase) {
        if (auto timeline = device_clock().timeline()) {
          timeline->mark(std::move(phase), kDefaultStream);
        }
      },
      py::arg("phase"));
  module.def(
      "time_on_device",
      [] {
        const auto timeline = device_clock().timeline();
        return timeline ? timeline->record(kDefaultStream) : 0.0;
      },
      "Seconds until what was issued on the compute stream is done.");
}

}  // namespace lowtide::phantom::python
