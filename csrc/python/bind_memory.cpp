// Bindings of csrc/memory: Ledger and AllocationTimeline, no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "memory/allocation_timeline.h"
#include "memory/ledger.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

using memory::AllocationTimeline;
using memory::Ledger;

template <typename Value>
using ByColumn = std::vector<std::pair<std::string, Value>>;

std::string name_of(std::size_t category) {
  return std::string(
      memory::category_name(static_cast<memory::Category>(category)));
}

py::dict by_category(const memory::Bytes& bytes) {
  py::dict result;
  for (std::size_t i = 0; i < memory::kNumCategories; ++i) {
    result[py::str(name_of(i))] = bytes[i];
  }
  return result;
}

py::dict by_name(const Ledger& ledger, const std::string& category) {
  py::dict result;
  for (const auto& [name, named] :
       ledger.by_name(memory::category_of(category))) {
    result[py::str(name)] = py::make_tuple(named.live, named.peak);
  }
  return result;
}

std::vector<std::tuple<std::intptr_t, std::string, std::string>> take_log(
    Ledger& ledger) {
  std::vector<std::tuple<std::intptr_t, std::string, std::string>> result;
  for (auto& [begin, category, name] : ledger.take_log()) {
    result.emplace_back(reinterpret_cast<std::intptr_t>(begin),
                        memory::category_name(category), std::move(name));
  }
  return result;
}

// A sample as (column, value) pairs, always in the same order.
ByColumn<std::int64_t> columns_of(const AllocationTimeline::Sample& sample) {
  ByColumn<std::int64_t> columns = {{"event", sample.event},
                                    {"nanoseconds", sample.nanoseconds},
                                    {"total", sample.total},
                                    {"other", sample.other()}};
  for (std::size_t i = 0; i < memory::kNumCategories; ++i) {
    columns.emplace_back(name_of(i), sample.lowtide[i]);
  }
  return columns;
}

py::dict peak(const AllocationTimeline& timeline) {
  py::dict result;
  for (const auto& [name, value] : columns_of(timeline.peak())) {
    result[py::str(name)] = value;
  }
  return result;
}

py::dict samples(const AllocationTimeline& timeline) {
  ByColumn<std::vector<std::int64_t>> columns;
  for (const auto& [name, value] : columns_of({}))
    columns.push_back({name, {}});
  for (const auto& sample : timeline.samples()) {
    const auto values = columns_of(sample);
    for (std::size_t i = 0; i < columns.size(); ++i) {
      columns[i].second.push_back(values[i].second);
    }
  }
  py::dict result;
  for (auto& [name, values] : columns) {
    result[py::str(name)] = py::cast(std::move(values));
  }
  return result;
}

}  // namespace

void bind_memory(py::module_& module) {
  py::class_<Ledger, std::shared_ptr<Ledger>>(
      module, "Ledger", "Bytes lowtide holds, by category and name.")
      .def(py::init<>())
      .def("live", [](const Ledger& l) { return by_category(l.live()); })
      .def(
          "peak", [](const Ledger& l) { return by_category(l.peak()); },
          "Each category at its own worst moment.")
      .def(
          "at_total_peak",
          [](const Ledger& l) { return by_category(l.at_total_peak()); },
          "All categories at the worst moment of their sum.")
      .def_property_readonly("total_live", &Ledger::total_live)
      .def_property_readonly("total_peak", &Ledger::total_peak)
      .def(
          "num_leases",
          [](const Ledger& l, const std::string& category) {
            return l.num_leases(memory::category_of(category));
          },
          py::arg("category"))
      .def("by_name", &by_name, py::arg("category"),
           "name -> (live, peak) in bytes.")
      .def("take_log", &take_log,
           "(address, category, name) of every lease since the last call, from "
           "the first on.")
      .def("reset_peaks", &Ledger::reset_peaks);

  py::class_<AllocationTimeline>(
      module, "AllocationTimeline",
      "Live bytes of torch and lowtide while it runs.")
      .def(py::init([](const c10::Device& device,
                       std::shared_ptr<Ledger> ledger, std::size_t capacity) {
             return std::make_unique<AllocationTimeline>(
                 device.type(), std::move(ledger), capacity);
           }),
           py::arg("device"), py::arg("ledger") = nullptr, py::kw_only(),
           py::arg("capacity") = 4096)
      .def("start", &AllocationTimeline::start)
      .def("stop", &AllocationTimeline::stop)
      .def("__enter__",
           [](py::object self) {
             self.cast<AllocationTimeline&>().start();
             return self;
           })
      .def("__exit__", [](AllocationTimeline& timeline,
                          const py::args&) { timeline.stop(); })
      .def("samples", &samples,
           "Columns of equal length: event, nanoseconds, total, other and each "
           "category of the ledger.")
      .def("peak", &peak, "The sample with the largest total.");
}

}  // namespace lowtide::python
