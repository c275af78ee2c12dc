// Bindings of csrc/activation: construction from Python objects, no logic.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "activation/frame.h"
#include "activation/lineage.h"
#include "activation/region.h"
#include "activation/transfer.h"
#include "base/seen_version.h"
#include "memory/pinned_pool.h"
#include "python/bindings.h"
#include "python/call_key.h"
#include "python/checkpointed_call.h"
#include "python/pool_figures.h"
#include "python/saved_tensor_hooks.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

using namespace activation;
using memory::PinnedPool;
using pybind11::literals::operator""_a;

Treatment treatment_of(const std::string& name) {
  if (name == "save") return Treatment::save;
  return name == "offload" ? Treatment::offload : Treatment::recompute;
}

Policy policy_of(const std::map<std::string, std::string>& names,
                 std::int64_t min_bytes, std::int64_t prefetch,
                 std::int64_t keep_last) {
  Policy policy{{}, min_bytes, {prefetch, keep_last}};
  for (const auto& [name, treatment] : names) {
    policy.names[name] = treatment_of(treatment);
  }
  return policy;
}

py::dict as_dict(const NameFigures& figures) {
  return py::dict(
      "matched"_a = figures.matched, "kept"_a = figures.kept,
      "kept_bytes"_a = figures.kept_bytes, "moved"_a = figures.moved,
      "moved_bytes"_a = figures.moved_bytes, "shared"_a = figures.shared,
      "recomputed"_a = figures.recomputed, "skipped"_a = figures.skipped);
}

py::dict region_figures(CheckpointedCall& call) {
  py::dict dict;
  for (const auto& [name, figures] : call.region()->figures().names()) {
    dict[py::str(name)] = as_dict(figures);
  }
  return dict;
}

py::dict transfer_figures(const Transfers& transfers) {
  const auto figures = transfers.figures();
  return py::dict("leaving_peak"_a = figures.leaving_peak,
                  "device_peak"_a = figures.device_peak,
                  "peak_moment"_a = figures.peak_moment,
                  "fetched_inline"_a = figures.fetched_inline,
                  "fetched_ahead"_a = figures.fetched_ahead,
                  "host_ns_copying"_a = figures.host_ns_copying,
                  "exposed_ns"_a = figures.exposed_ns);
}

std::shared_ptr<Region> make_region(
    std::string who, const std::map<std::string, std::string>& names,
    std::int64_t min_bytes, std::int64_t prefetch, std::int64_t keep_last,
    std::shared_ptr<NameBook> book, py::object transfers_of) {
  return std::make_shared<Region>(
      std::move(who), policy_of(names, min_bytes, prefetch, keep_last),
      std::move(book),
      [transfers_of = std::move(transfers_of)](const c10::Device& device) {
        return transfers_of(device).cast<std::shared_ptr<Transfers>>();
      });
}

void bind_transfers(py::module_& module) {
  py::class_<Transfers, std::shared_ptr<Transfers>>(module, "Transfers")
      .def(py::init([](std::shared_ptr<memory::DeviceMemory> memory,
                       std::int64_t cap_bytes) {
             auto ledger = std::make_shared<memory::Ledger>();
             auto pool = std::make_shared<PinnedPool>(
                 memory->shared_runtime(), std::move(ledger), cap_bytes);
             return std::make_shared<Transfers>(
                 Memories{std::move(memory), std::move(pool)});
           }),
           py::arg("memory"), py::arg("cap_bytes"))
      .def_property_readonly(
          "host_ledger",
          [](const Transfers& t) { return t.memories().host->ledger(); })
      .def_property_readonly(
          "device_ledger",
          [](const Transfers& t) { return t.memories().device->ledger(); })
      .def_property_readonly("device",
                             [](const Transfers& t) {
                               return t.memories().device->runtime().device();
                             })
      .def("pool_figures",
           [](const Transfers& t) { return pool_figures(*t.memories().host); })
      .def("figures", &transfer_figures)
      .def("reset_figures", &Transfers::reset_figures);
}

}  // namespace

void bind_activation(py::module_& module) {
  bind_stop_recomputation(module);
  module.attr("EMPTY_TENSOR") = activation::kEmpty;
  bind_transfers(module);

  py::class_<NameBook, std::shared_ptr<NameBook>>(module, "NameBook")
      .def(py::init<>())
      .def("all", &NameBook::all)
      .def("of", &NameBook::of, py::arg("tensor"));

  py::class_<Lineage>(module, "Lineage")
      .def(py::init<const std::vector<at::Tensor>&>(), py::arg("arguments"))
      .def("key_of", &key_of, py::arg("operator"), py::arg("args"),
           py::arg("kwargs"))
      .def("made", &Lineage::made, py::arg("output"), py::arg("call"),
           py::arg("number"), py::arg("place"))
      .def("wrote", &Lineage::wrote, py::arg("tensor"), py::arg("call"))
      .def(
          "producer_of",
          [](Lineage& lineage, const at::Tensor& tensor) {
            const auto found = lineage.producer_of(tensor);
            return py::make_tuple(found.number, found.place,
                                  found.written_since);
          },
          py::arg("tensor"));

  module.def("over_bytes", &base::over_bytes, py::arg("tensor"),
             py::arg("dtype"), py::arg("sizes"), py::arg("strides"),
             py::arg("offset"));

  module.def(
      "name_value",
      [](NameBook& book, const at::Tensor& tensor, const std::string& name) {
        name_value(book, tensor, name);
      },
      py::arg("book"), py::arg("tensor"), py::arg("name"));

  py::class_<Frame, std::shared_ptr<Frame>>(module, "Frame")
      .def("watch_interior", &Frame::watch_interior, py::arg("watcher"))
      .def("store", &Frame::store, py::arg("name"), py::arg("outputs"))
      .def("is_stored", &Frame::is_stored, py::arg("number"))
      .def("stored", &Frame::stored, py::arg("number"))
      .def("num_saved", &Frame::num_saved)
      .def("forbid_write", &Frame::forbid_write, py::arg("number"),
           py::arg("writer"))
      .def_property_readonly(
          "who", [](const Frame& frame) { return frame.region()->who(); })
      .def("share", &Frame::share, py::arg("name"), py::arg("number"))
      .def("refuse", &Frame::refuse, py::arg("name"), py::arg("reason"));

  py::class_<RegionCallbacks>(module, "RegionCallbacks")
      .def(py::init([](py::object call, py::object surroundings,
                       py::object recorder, py::object replayer,
                       py::object is_state, py::object device_of,
                       py::object first_backward) {
             return RegionCallbacks{
                 std::move(call),          std::move(surroundings),
                 std::move(recorder),      std::move(replayer),
                 std::move(is_state),      std::move(device_of),
                 std::move(first_backward)};
           }),
           py::kw_only(), py::arg("call"), py::arg("surroundings"),
           py::arg("recorder"), py::arg("replayer"), py::arg("is_state"),
           py::arg("device_of"), py::arg("first_backward"));

  py::class_<CheckpointedCall>(module, "Region")
      .def(py::init([](std::string who,
                       const std::map<std::string, std::string>& names,
                       std::int64_t min_bytes, std::int64_t prefetch,
                       std::int64_t keep_last, std::shared_ptr<NameBook> book,
                       py::object transfers_of, RegionCallbacks callbacks) {
             return std::make_unique<CheckpointedCall>(
                 make_region(std::move(who), names, min_bytes, prefetch,
                             keep_last, std::move(book),
                             std::move(transfers_of)),
                 std::move(callbacks));
           }),
           py::kw_only(), py::arg("who"), py::arg("names"),
           py::arg("min_bytes"), py::arg("prefetch"), py::arg("keep_last"),
           py::arg("book"), py::arg("transfers_of"), py::arg("callbacks"))
      // Turns C++ warnings into Python's.
      .def("run", torch::wrap_pybind_function(&CheckpointedCall::run),
           py::arg("module"), py::arg("args"), py::arg("kwargs"))
      .def(
          "rename",
          [](CheckpointedCall& call, std::string who) {
            call.region()->rename(std::move(who));
          },
          py::arg("who"))
      .def_property_readonly(
          "who", [](const CheckpointedCall& c) { return c.region()->who(); })
      .def_property_readonly(
          "transfers",
          [](const CheckpointedCall& c) { return c.region()->transfers(); })
      .def_property_readonly(
          "num_calls",
          [](const CheckpointedCall& c) { return c.region()->num_calls; })
      .def("figures", &region_figures)
      .def("reset_figures", [](CheckpointedCall& c) {
        c.region()->num_calls = 0;
        c.region()->figures().reset();
      });
}

}  // namespace lowtide::python
