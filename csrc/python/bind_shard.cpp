// Bindings of csrc/shard: construction from Python objects, no logic.
#include <c10/util/Logging.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/tensor_over.h"
#include "comm/collectives.h"
#include "comm/host_channel.h"
#include "device/make_runtime.h"
#include "memory/device_memory.h"
#include "memory/host_memory.h"
#include "python/all_gather_extension.h"
#include "python/bindings.h"
#include "python/forward_hooks.h"
#include "python/module_view.h"
#include "python/pool_figures.h"
#include "shard/graph/linear_node.h"
#include "shard/neighbours.h"
#include "shard/planned_step.h"
#include "shard/root.h"
#include "shard/sleeping_bytes.h"
#include "shard/unit.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using pybind11::literals::operator""_a;

std::shared_ptr<memory::DeviceMemory> make_device_memory(
    const c10::Device& device, std::shared_ptr<memory::Ledger> ledger) {
  return std::make_shared<memory::DeviceMemory>(device::make_runtime(device),
                                                std::move(ledger));
}

at::ScalarType dtype_of(const py::object& dtype) {
  return py::cast<at::ScalarType>(dtype);
}

std::optional<at::ScalarType> optional_dtype_of(const py::object& dtype) {
  if (dtype.is_none()) return std::nullopt;
  return dtype_of(dtype);
}

std::shared_ptr<shard::Unit> make_unit(
    std::string name, std::vector<shard::ParameterInfo> infos,
    std::shared_ptr<comm::Collectives> gather,
    std::shared_ptr<comm::Collectives> reduce,
    std::shared_ptr<memory::DeviceMemory> memory,
    std::shared_ptr<shard::UnitSettings> settings, std::size_t modules,
    std::shared_ptr<comm::HostChannel> host) {
  return std::make_shared<shard::Unit>(
      std::move(name), std::move(infos),
      shard::UnitGroups{std::move(gather), std::move(reduce), std::move(host)},
      std::move(memory), std::move(settings), modules);
}

// Owns a Python callable; dies under the GIL.
template <typename... Arguments>
std::function<void(Arguments...)> hook_of(const py::object& hook) {
  if (hook.is_none()) return {};
  const auto release = [](py::object* dying) {
    const py::gil_scoped_acquire gil;
    const std::unique_ptr<py::object> owned(dying);
  };
  const std::shared_ptr<py::object> callable(
      std::make_unique<py::object>(hook).release(), release);
  return [callable](Arguments... arguments) {
    const py::gil_scoped_acquire gil;
    (*callable)(arguments...);
  };
}

using SlotTuple = std::tuple<py::dict, py::str, std::int32_t>;

void attach(shard::Unit& unit, const std::vector<SlotTuple>& slots,
            std::vector<py::object> shards, std::vector<py::object> full,
            py::object wrap, py::object unwrap, py::object refuse,
            const std::optional<std::array<py::object, 3>>& extension) {
  std::vector<PyModuleView::Slot> places;
  places.reserve(slots.size());
  for (const auto& [parameters, name, index] : slots) {
    places.push_back({parameters, name, index});
  }
  std::vector<at::Tensor> shard_tensors;
  std::vector<at::Tensor> local_tensors;
  std::vector<at::Tensor> full_tensors;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    shard_tensors.push_back(THPVariable_Unpack(shards[i].ptr()));
    local_tensors.push_back(
        THPVariable_Unpack(shards[i].attr("_local_tensor").ptr()));
    full_tensors.push_back(THPVariable_Unpack(full[i].ptr()));
  }
  unit.attach(std::move(shard_tensors), std::move(full_tensors),
              std::make_unique<PyModuleView>(
                  std::move(places), std::move(shards), std::move(full),
                  std::move(wrap), std::move(unwrap), std::move(refuse)),
              extension ? std::make_unique<PyAllGatherExtension>(
                              (*extension)[0], (*extension)[1], (*extension)[2])
                        : nullptr,
              local_tensors);
}

// Outside of a step, where the host may write to shards next.
template <void (shard::Unit::*Method)()>
void then_wait(shard::Unit& unit) {
  (unit.*Method)();
  unit.wait_for_host_copies();
}

at::Tensor fused_linear(const std::shared_ptr<shard::Unit>& unit,
                        std::int32_t parameter, const at::Tensor& input,
                        const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias) {
  const py::gil_scoped_release no_gil;
  return shard::fused_linear(unit, parameter, input, weight,
                             bias.value_or(at::Tensor()));
}

shard::UnitBytes bytes_of(shard::Unit& unit) {
  const auto& buffers = unit.parameters().buffers();
  auto& gradients = unit.gradients();
  const auto& trainable = gradients.trainable();
  return {
      .parameters = buffers.shard_bytes(),
      .gathered = unit.rows().gathered_bytes() + buffers.passing_bytes(),
      .gather_input = unit.rows().input_bytes(),
      .gradient_chunks = gradients.num_chunks(),
      .gradient_slot = gradients.slot_bytes(),
      .gradient_slots = gradients.num_slots(),
      .own_slots = gradients.own_slots(),
      .gradient_slab = gradients.slab_bytes(),
      .gradient_in_place = gradients.in_place_bytes(),
      .partial_gradients = gradients.reduction().of_whole_units()
                               ? gradients.partial().bytes_of(trainable)
                               : 0,
      .sharded_gradients = gradients.sharded().generation_bytes(trainable),
  };
}

py::dict unit_plan(shard::Unit& unit) {
  const auto bytes = bytes_of(unit);
  return py::dict("parameters"_a = bytes.parameters,
                  "gathered"_a = bytes.gathered,
                  "gather_input"_a = bytes.gather_input,
                  "gradient_chunks"_a = bytes.gradient_chunks,
                  "gradient_slot"_a = bytes.gradient_slot,
                  "gradient_slots"_a = bytes.gradient_slots,
                  "gradient_own_slots"_a = bytes.own_slots ? 1 : 0,
                  "gradient_slab"_a = bytes.gradient_slab,
                  "gradient_in_place"_a = bytes.gradient_in_place,
                  "partial_gradients"_a = bytes.partial_gradients,
                  "sharded_gradients"_a = bytes.sharded_gradients);
}

// `inside`: the number of the unit whose forward each one's own runs in, or -1.
py::dict planned_peaks(const std::vector<std::shared_ptr<shard::Unit>>& units,
                       const std::vector<std::int32_t>& inside) {
  std::vector<shard::PlannedUnit> planned;
  for (std::size_t i = 0; i < units.size(); ++i) {
    auto& unit = *units[i];
    const auto& settings = unit.settings();
    std::vector<std::int32_t> beside;
    for (const auto& other : settings.beside) {
      const auto found = std::find(units.begin(), units.end(), other.lock());
      if (found == units.end()) continue;
      beside.push_back(static_cast<std::int32_t>(found - units.begin()));
    }
    planned.push_back(
        {.bytes = bytes_of(unit),
         .inside = inside.at(i),
         .reshard_after_forward =
             settings.reshard_after_forward && !settings.keep_unsharded_storage,
         .gradient_sync = settings.gradient_sync,
         .all_reduce = settings.reduction.all_reduce,
         .offloaded = settings.host != nullptr,
         .beside = std::move(beside)});
  }
  const auto peaks = shard::planned_peaks(planned);
  return py::dict("parameters"_a = peaks.parameters,
                  "gathered"_a = peaks.gathered,
                  "gather_input"_a = peaks.gather_input,
                  "gradient_stream"_a = peaks.gradient_stream,
                  "gradient_slab"_a = peaks.gradient_slab,
                  "sharded_gradients"_a = peaks.sharded_gradients,
                  "host_parameters"_a = peaks.host_parameters,
                  "host_gradients"_a = peaks.host_gradients);
}

std::shared_ptr<shard::SleepingBytes> put_to_sleep(
    const std::vector<std::pair<std::string, at::Tensor>>& tensors,
    std::shared_ptr<memory::DeviceMemory> device,
    const std::shared_ptr<memory::PinnedPool>& host) {
  std::vector<shard::SleepingBytes::Named> named;
  named.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    named.push_back({tensor, name});
  }
  const py::gil_scoped_release no_gil;
  return std::make_shared<shard::SleepingBytes>(named, std::move(device), host);
}

// Of DTensors: the rows of `values`, which have the very specs of `parameters`,
// as one, see neighbours.h; none if they can not be, or have others.
std::optional<at::Tensor> rows_as_one(const py::list& values,
                                      const py::list& parameters) {
  static const py::str kSpec("_spec");
  static const py::str kRows("_local_tensor");
  const auto num_parameters = parameters.size();
  LOWTIDE_INVARIANT(values.size() == num_parameters, "a value a parameter");
  std::vector<at::Tensor> rows;
  std::vector<at::Tensor> like;
  rows.reserve(num_parameters);
  like.reserve(num_parameters);
  for (std::size_t i = 0; i < num_parameters; ++i) {
    const py::handle value = values[i];
    const py::handle parameter = parameters[i];
    if (!value.is(parameter) && !value.attr(kSpec).is(parameter.attr(kSpec))) {
      return std::nullopt;
    }
    rows.push_back(THPVariable_Unpack(value.attr(kRows).ptr()));
    like.push_back(THPVariable_Unpack(parameter.attr(kRows).ptr()));
  }
  auto whole = shard::neighbours_as_one(rows, like);
  if (!whole.defined()) return std::nullopt;
  return whole;
}

// Host bytes as a tensor, which gives them back behind the compute stream's
// work of that moment.
at::Tensor host_tensor(const std::shared_ptr<memory::PinnedPool>& pool,
                       const memory::DeviceMemory& device,
                       const std::string& name, std::int64_t bytes) {
  struct Held {
    memory::HostSlot slot;
    std::shared_ptr<device::Runtime> runtime;
  };
  auto held = std::make_unique<Held>(
      Held{pool->acquire(name, bytes), device.shared_runtime()});
  void* const data = held->slot.data();
  const auto release = [](void* context) {
    const std::unique_ptr<Held> dying(static_cast<Held*>(context));
    try {
      dying->slot.set_last_use(dying->runtime->record(device::Stream::compute));
    } catch (const std::exception& error) {  // the device is gone, say
      LOG(WARNING) << error.what();
    }
  };
  return base::tensor_over(
      base::owning_storage(
          c10::DataPtr(data, held.release(), release, c10::Device(at::kCPU)),
          bytes),
      at::kByte, {bytes}, {1}, 0);
}

void bind_device_memory(py::module_& module) {
  py::class_<memory::DeviceMemory, std::shared_ptr<memory::DeviceMemory>>(
      module, "DeviceMemory")
      .def(py::init(&make_device_memory), py::arg("device"), py::arg("ledger"))
      .def(
          "fail_next_lease",
          [](memory::DeviceMemory& memory, const std::string& category,
             std::string name) {
            memory.fail_next_lease(memory::category_of(category),
                                   std::move(name));
          },
          py::arg("category"), py::arg("name"))
      .def("set_poison", &memory::DeviceMemory::set_poison, py::arg("poison"));

  py::class_<memory::PinnedPool, std::shared_ptr<memory::PinnedPool>>(
      module, "PinnedPool", "Page-locked bytes that device memory waits in.")
      .def(py::init([](const memory::DeviceMemory& device,
                       std::int64_t cap_bytes, std::string holds) {
             return std::make_shared<memory::PinnedPool>(
                 device.shared_runtime(), std::make_shared<memory::Ledger>(),
                 cap_bytes, std::move(holds));
           }),
           py::arg("device"), py::kw_only(), py::arg("cap_bytes"),
           py::arg("holds"))
      .def_property_readonly("ledger", &memory::PinnedPool::ledger)
      .def("figures", &pool_figures)
      .def("host_tensor", &host_tensor, py::arg("device"), py::arg("name"),
           py::arg("bytes"));

  py::class_<memory::HostMemory, std::shared_ptr<memory::HostMemory>>(
      module, "HostMemory", "Where offloaded parameters and gradients are.")
      .def(py::init([](const memory::DeviceMemory& device,
                       std::shared_ptr<memory::PinnedPool> pool,
                       bool page_locked) {
             return std::make_shared<memory::HostMemory>(
                 device.shared_runtime(), std::move(pool), page_locked);
           }),
           py::arg("device"), py::kw_only(), py::arg("pool"),
           py::arg("page_locked"))
      .def("wait", &memory::HostMemory::wait, NoGil());
}

// By kind, those that there were.
std::map<std::string, std::int64_t> calls_of(const shard::Root& root,
                                             const shard::Unit& unit) {
  const auto counts = root.log().counts(unit.number());
  std::map<std::string, std::int64_t> calls;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) calls[shard::StepNote::kKinds[i]] = counts[i];
  }
  return calls;
}

}  // namespace

void bind_shard(py::module_& module) {
  bind_device_memory(module);

  py::class_<shard::ParameterInfo>(module, "ParameterInfo")
      .def(py::init([](std::string name, std::vector<std::int64_t> sizes,
                       const py::object& storage_dtype,
                       const py::object& compute_dtype,
                       const py::object& reduce_dtype, std::int64_t shard_dim,
                       bool extended, bool gradient_as_computed,
                       const py::object& gradient_dtype,
                       const py::object& arriving_dtype, bool summed_before) {
             return shard::ParameterInfo{std::move(name),
                                         std::move(sizes),
                                         dtype_of(storage_dtype),
                                         dtype_of(compute_dtype),
                                         dtype_of(reduce_dtype),
                                         shard_dim,
                                         extended,
                                         gradient_as_computed,
                                         optional_dtype_of(gradient_dtype),
                                         optional_dtype_of(arriving_dtype),
                                         summed_before};
           }),
           py::kw_only(), py::arg("name"), py::arg("sizes"),
           py::arg("storage_dtype"), py::arg("compute_dtype"),
           py::arg("reduce_dtype"), py::arg("shard_dim") = 0,
           py::arg("extended") = false, py::arg("gradient_as_computed") = false,
           py::arg("gradient_dtype") = py::none(),
           py::arg("arriving_dtype") = py::none(),
           py::arg("summed_before") = false);

  using shard::UnitSettings;
  py::class_<UnitSettings, std::shared_ptr<UnitSettings>>(module,
                                                          "UnitSettings")
      .def(py::init<>())
      .def_readwrite("reshard_after_forward",
                     &UnitSettings::reshard_after_forward)
      .def_readwrite("keep_unsharded_storage",
                     &UnitSettings::keep_unsharded_storage)
      .def_readwrite("reshard_after_backward",
                     &UnitSettings::reshard_after_backward)
      .def_readwrite("post_forward_group", &UnitSettings::post_forward_group)
      .def_readwrite("gradient_sync", &UnitSettings::gradient_sync)
      .def_readwrite("unshard_in_backward", &UnitSettings::unshard_in_backward)
      .def_readwrite("encloses_units", &UnitSettings::encloses_units)
      .def_readwrite("leaf_module", &UnitSettings::leaf_module)
      .def("set_on_gradients",
           [](UnitSettings& settings, const py::object& hook) {
             settings.on_gradients = hook_of<>(hook);
           })
      .def_readwrite("host", &UnitSettings::host)
      .def(
          "prefetch",
          [](UnitSettings& settings,
             const std::vector<std::shared_ptr<shard::Unit>>& forward,
             const std::vector<std::shared_ptr<shard::Unit>>& backward) {
            settings.forward_prefetch.assign(forward.begin(), forward.end());
            settings.backward_prefetch.assign(backward.begin(), backward.end());
          },
          py::kw_only(), py::arg("forward"), py::arg("backward"))
      .def("stand_beside",
           [](UnitSettings& settings,
              const std::vector<std::shared_ptr<shard::Unit>>& others) {
             settings.beside.assign(others.begin(), others.end());
           })
      .def_property_readonly(
          "reduction",
          [](UnitSettings& settings) { return &settings.reduction; },
          py::return_value_policy::reference_internal);

  using shard::GradientReduction;
  py::class_<GradientReduction>(module, "GradientReduction")
      .def_readwrite("replicas", &GradientReduction::replicas)
      .def_readwrite("divide_factor", &GradientReduction::divide_factor)
      .def_readwrite("sum_only", &GradientReduction::sum_only)
      .def_readwrite("all_reduce", &GradientReduction::all_reduce)
      .def_readwrite("unused_too", &GradientReduction::unused_too)
      .def("set_hook",
           [](GradientReduction& reduction, const py::object& hook) {
             reduction.hook = hook_of<const at::Tensor&>(hook);
           });

  using shard::Unit;
  py::class_<Unit, std::shared_ptr<Unit>>(module, "Unit")
      .def(py::init(&make_unit), py::kw_only(), py::arg("name"),
           py::arg("infos"), py::arg("gather_group"), py::arg("reduce_group"),
           py::arg("memory"), py::arg("settings"), py::arg("modules"),
           py::arg("host_channel") = nullptr)
      .def_property_readonly("name", &Unit::name)
      .def("rename", &Unit::rename, py::arg("name"), py::arg("parameters"))
      .def_property_readonly(
          "state",
          [](const Unit& unit) {
            return std::string(shard::state_name(unit.parameters().state()));
          })
      .def_property_readonly("root", &Unit::root)
      .def("use_groups",
           [](Unit& unit, std::shared_ptr<comm::Collectives> gather,
              std::shared_ptr<comm::Collectives> reduce) {
             unit.use_groups({std::move(gather), std::move(reduce)});
           })
      .def("local_shard",
           [](Unit& unit, std::size_t i) {
             return unit.parameters().buffers().local_shard(i);
           })
      .def("full",
           [](Unit& unit, std::size_t i) {
             return unit.parameters().buffers().full(i);
           })
      .def("plan", &unit_plan,
           "bytes of each buffer of this unit when present, and its chunks")
      .def_property_readonly(
          "accumulating",
          [](const Unit& unit) { return unit.gradients().accumulating(); })
      .def("drop_waiting_gradient", &Unit::drop_waiting_gradient)
      .def_property_readonly(
          "waiting_buffers",
          [](const Unit& unit) { return unit.gradients().waiting_buffers(); })
      .def(
          "waiting_gradient",
          [](Unit& unit, std::int32_t i) {
            const auto waiting = unit.gradients().waiting(i);
            return std::tuple(waiting.accumulating, waiting.unreduced,
                              waiting.partial);  // tensors, or None
          },
          py::arg("i"))
      .def(
          "bring_back_gradient",
          [](Unit& unit, std::int32_t i, bool accumulating,
             const std::optional<at::Tensor>& unreduced,
             const std::optional<at::Tensor>& partial) {
            unit.bring_back_gradient(
                i, {accumulating, unreduced.value_or(at::Tensor()),
                    partial.value_or(at::Tensor())});
          },
          py::arg("i"), py::arg("accumulating"), py::arg("unreduced"),
          py::arg("partial"))
      .def_property_readonly("attached",
                             [](const Unit& unit) {
                               return unit.parameters().leaves().attached();
                             })
      .def("attach", &attach, py::kw_only(), py::arg("slots"),
           py::arg("shards"), py::arg("full"), py::arg("wrap"),
           py::arg("unwrap"), py::arg("refuse"), py::arg("extension"))
      .def("detach", &Unit::detach)
      .def(
          "stream_rows",
          [](Unit& unit) { return &unit.rows().read(shard::RowReads::blocks); },
          py::return_value_policy::reference_internal)
      .def(
          "gradient_rows",
          [](Unit& unit) {
            return &unit.rows().read(shard::RowReads::gradient);
          },
          py::return_value_policy::reference_internal)
      .def(
          "look_up_rows",
          [](Unit& unit, std::int64_t rows_at_once) {
            return &unit.rows().read(shard::RowReads::lookup, rows_at_once);
          },
          py::arg("rows_at_once"), py::return_value_policy::reference_internal)
      .def_property_readonly(
          "looks_up_rows",
          [](const Unit& unit) { return unit.rows().looks_up(); })
      .def("fuse_gradients", &Unit::fuse_gradients, py::arg("fused"))
      .def(
          "refuse_fused",
          [](Unit& unit, std::int32_t parameter, const std::string& why) {
            unit.fused().refuse(parameter, why);
          },
          py::arg("parameter"), py::arg("why"))
      .def_property_readonly("fused_uses",
                             [](Unit& unit) { return unit.fused().uses(); })
      .def(
          "in_place",
          [](const Unit& unit, std::int32_t parameter) {
            return unit.gradients().in_place(parameter);
          },
          py::arg("parameter"))
      .def(
          "main_gradient",
          [](Unit& unit, std::int32_t parameter) {
            return unit.fused().main_gradient(parameter);
          },
          py::arg("parameter"))
      .def("gather", &Unit::gather, NoGil())
      .def("unshard", &then_wait<&Unit::unshard>, NoGil())
      .def("reshard", &then_wait<&Unit::reshard>, NoGil());

  module.def("planned_peaks", &planned_peaks, py::arg("units"),
             py::arg("inside"));

  using shard::FusedUses;
  py::class_<FusedUses>(module, "FusedUses")
      .def_readonly("added", &FusedUses::added)
      .def_readonly("hooks", &FusedUses::hooks)
      .def_readonly("asked_for", &FusedUses::asked_for)
      .def_readonly("recorded", &FusedUses::recorded)
      .def_readonly("elsewhere", &FusedUses::elsewhere)
      .def_readonly("repeated", &FusedUses::repeated)
      .def_readonly("refused", &FusedUses::refused)
      .def_property_readonly("unexplained", &FusedUses::unexplained);
  module.def("fused_linear", &fused_linear, py::kw_only(), py::arg("unit"),
             py::arg("parameter"), py::arg("input"), py::arg("weight"),
             py::arg("bias"));

  using shard::RowPass;
  using shard::RowStream;
  py::class_<RowStream>(module, "RowStream")
      .def_property_readonly("world_size", &RowStream::world_size)
      .def_property_readonly("num_rows", &RowStream::num_rows)
      .def_property_readonly("padded_rows", &RowStream::padded_rows)
      .def_property_readonly("sums_as_reduced", &RowStream::sums_as_reduced)
      .def_property_readonly("block_rows", &RowStream::block_rows)
      .def_property_readonly("num_blocks", &RowStream::num_blocks)
      .def(
          "begin_forward",
          [](RowStream& rows, bool recorded) {
            rows.begin(recorded ? RowPass::recorded : RowPass::forward);
          },
          NoGil(), py::arg("recorded"))
      .def(
          "begin_backward",
          [](RowStream& rows) { rows.begin(RowPass::backward); }, NoGil())
      .def(
          "begin_lookup", [](RowStream& rows) { rows.begin(RowPass::lookup); },
          NoGil())
      .def_property_readonly("lookup_rows", &RowStream::lookup_rows)
      .def("fetch", &RowStream::fetch, NoGil(), py::arg("block"))
      .def("put", &RowStream::put, NoGil(), py::arg("block"),
           py::arg("gradient"))
      .def("end", &RowStream::end, NoGil());

  // Without a pool they are dropped.
  using shard::SleepingBytes;
  py::class_<SleepingBytes, std::shared_ptr<SleepingBytes>>(module,
                                                            "SleepingBytes")
      .def(py::init(&put_to_sleep), py::arg("tensors"), py::arg("device"),
           py::arg("host"))
      .def("wake", &SleepingBytes::wake, NoGil())
      .def("holds", &SleepingBytes::holds, py::arg("tensor"))
      .def_property_readonly("bytes", &SleepingBytes::bytes)
      .def_property_readonly("dropped", &SleepingBytes::dropped);

  module.def("rows_as_one", &rows_as_one, py::arg("values"),
             py::arg("parameters"));
  module.def(
      "parts_of",
      [](const at::Tensor& whole, const std::vector<at::Tensor>& like) {
        return shard::parts_of(whole, like);
      },
      py::arg("whole"), py::arg("like"));

  using shard::Root;
  py::class_<Root, std::shared_ptr<Root>>(module, "Root")
      .def(py::init<std::string, std::shared_ptr<memory::DeviceMemory>>(),
           py::arg("name"), py::arg("memory"))
      .def("adopt", &Root::adopt, py::arg("units"),
           py::arg("host_channel") = nullptr)
      .def_property("gradient_budget", &Root::gradient_budget,
                    &Root::set_gradient_budget)
      .def("reduce_accumulated", &Root::reduce_accumulated, NoGil())
      .def("optimizer_stepped", &Root::optimizer_stepped)
      .def_property_readonly("optimizer_steps", &Root::optimizer_steps)
      .def_property_readonly("backwards", &Root::backwards)
      .def("ended", &Root::ended, py::arg("backward"))
      .def_property_readonly("entered_units", &Root::entered_units)
      .def("calls_of", &calls_of, py::arg("unit"))
      .def("abort", &Root::abort, NoGil(), py::arg("drop_gradients") = true);

  py::class_<ForwardHooks>(module, "ForwardHooks")
      .def(py::init([](const py::object& inputs, const py::object& outputs,
                       bool of_each, py::object lazy_init,
                       const std::vector<py::object>& modules) {
             ForwardHooks::Casts casts;
             casts.of_each = of_each;
             if (!inputs.is_none()) casts.inputs = dtype_of(inputs);
             if (!outputs.is_none()) casts.outputs = dtype_of(outputs);
             return std::make_unique<ForwardHooks>(casts, std::move(lazy_init),
                                                   modules);
           }),
           py::kw_only(), py::arg("cast_inputs"), py::arg("cast_outputs"),
           py::arg("cast_each"), py::arg("lazy_init"), py::arg("modules"))
      .def("set_unit", &ForwardHooks::set_unit)
      .def("look_again", &ForwardHooks::look_again)
      .def("move_inputs_to",
           [](ForwardHooks& hooks, const c10::Device& device) {
             hooks.move_inputs_to(device);
           })
      .def("pre", &ForwardHooks::pre)
      .def("post", &ForwardHooks::post, py::arg("module"), py::arg("args"),
           py::arg("output"), py::arg("casts_output") = true);
}

}  // namespace lowtide::python
