// Bindings of csrc/comm: Collectives over a registered process group, no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/borrowed_group.h"
#include "comm/c10d_collectives.h"
#include "comm/first_failure.h"
#include "comm/host_channel.h"
#include "python/bindings.h"
#include "python/custom_collectives.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

using comm::Collectives;
using comm::Pending;
using NoGil = py::call_guard<py::gil_scoped_release>;
using Tensors = std::vector<at::Tensor>;

void give_back_ended_groups() {
  const py::gil_scoped_release no_gil;
  comm::BorrowedGroup::give_back_ended();
}

// Until torch's own object of Python's is gone, which destroy_process_group
// drops.
std::shared_ptr<comm::BorrowedGroup> borrow(const std::string& group_name) {
  give_back_ended_groups();
  const auto group = c10d::resolve_process_group(group_name);
  const py::cpp_function at_end([](const py::handle& reference) {
    give_back_ended_groups();
    reference.dec_ref();
  });
  py::weakref(py::cast(group), at_end).release();
  return std::make_shared<comm::BorrowedGroup>(group, group_name);
}

std::shared_ptr<Collectives> make_collectives(const std::string& group_name,
                                              const c10::Device& device) {
  return std::make_shared<comm::C10dCollectives>(borrow(group_name), device);
}

std::shared_ptr<comm::HostChannel> make_host_channel(
    const std::string& group_name) {
  return comm::make_host_channel(borrow(group_name));
}

std::shared_ptr<comm::C10dCollectives> of_a_group(
    const std::shared_ptr<Collectives>& collectives) {
  auto result = std::dynamic_pointer_cast<comm::C10dCollectives>(collectives);
  if (!result) {
    throw InvalidArgument(base::error_text(
        "collectives", "a process group's own", "those of comm objects",
        "Ask what with_custom() was called of."));
  }
  return result;
}

std::shared_ptr<Collectives> with_custom(
    const std::shared_ptr<Collectives>& base, py::object all_gather,
    py::object reduce_scatter) {
  return std::make_shared<CustomCollectives>(
      of_a_group(base), std::move(all_gather), std::move(reduce_scatter));
}

comm::Reduction reduction_of(bool average) {
  return average ? comm::Reduction::average : comm::Reduction::sum;
}

py::dict counters(const Collectives& collectives) {
  py::dict result;
  for (std::size_t kind = 0; kind < comm::kNumKinds; ++kind) {
    const comm::Count& count = collectives.counters()[kind];
    const auto name = comm::kind_name(static_cast<comm::Kind>(kind));
    result[py::str(std::string(name))] =
        py::make_tuple(count.calls, count.wire_bytes);
  }
  return result;
}

}  // namespace

void bind_comm(py::module_& module) {
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&give_back_ended_groups));
  module.def(
      "find_first_failure_in",
      [](const std::string& group_name, const std::string& key) {
        comm::find_first_failure_in(borrow(group_name), key);
      },
      py::arg("group_name"), py::arg("key"));

  py::class_<Pending>(module, "Pending", "A collective on its way.")
      .def("wait", &Pending::wait, NoGil());

  using comm::HostChannel;
  py::class_<HostChannel::Maximum>(module, "HostMaximum",
                                   "Numbers on their way.")
      .def("wait", &HostChannel::Maximum::wait, NoGil());
  py::class_<HostChannel, std::shared_ptr<HostChannel>>(
      module, "HostChannel", "Numbers of the host, compared over ranks.")
      .def(py::init(&make_host_channel), py::arg("group_name"))
      .def("maximum", &HostChannel::maximum, py::arg("numbers"), NoGil())
      .def_property_readonly(
          "process_group",
          [](const HostChannel& channel) { return channel.group()->get(); })
      .def_property_readonly("rank", &HostChannel::rank)
      .def_property_readonly("size", &HostChannel::size);

  py::class_<Collectives, std::shared_ptr<Collectives>>(
      module, "Collectives", "The collectives lowtide issues, counted.")
      .def(py::init(&make_collectives), py::arg("group_name"),
           py::arg("device"))
      .def_property_readonly("rank", &Collectives::rank)
      .def_property_readonly("size", &Collectives::size)
      .def_property_readonly("backend", &Collectives::backend)
      .def_property_readonly("counters", &counters,
                             "collective -> (calls, bytes on the wire)")
      .def("reset_counters", &Collectives::reset_counters)
      .def_property_readonly(
          "process_group",
          [](const std::shared_ptr<Collectives>& collectives) {
            return of_a_group(collectives)->group()->get();
          },
          "Raises once it was destroyed.")
      .def(
          "is_over",
          [](const std::shared_ptr<Collectives>& collectives,
             const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
            return of_a_group(collectives)->group()->is(group);
          },
          py::arg("group"), "Names of groups come again: whether it is this.")
      .def("with_custom", &with_custom, py::kw_only(), py::arg("all_gather"),
           py::arg("reduce_scatter"),
           "The same ranks, with FSDP2's comm objects (or None).")
      .def(
          "all_gather",
          [](Collectives& collectives, Tensors outs, Tensors ins,
             const std::string& label) {
            return collectives.all_gather(outs, ins, label);
          },
          py::arg("outs"), py::arg("ins"), py::kw_only(), py::arg("label"),
          NoGil())
      .def(
          "reduce_scatter",
          [](Collectives& collectives, at::Tensor out, at::Tensor in,
             bool average, const std::string& label) {
            return collectives.reduce_scatter(out, in, reduction_of(average),
                                              label);
          },
          py::arg("out"), py::arg("input"), py::kw_only(), py::arg("average"),
          py::arg("label"), NoGil())
      .def(
          "reduce_scatter_coalesced",
          [](Collectives& collectives, Tensors outs, Tensors ins, bool average,
             const std::string& label) {
            return collectives.reduce_scatter_coalesced(
                outs, ins, reduction_of(average), label);
          },
          py::arg("outs"), py::arg("ins"), py::kw_only(), py::arg("average"),
          py::arg("label"), NoGil());
}

}  // namespace lowtide::python
