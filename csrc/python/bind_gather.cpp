// Bindings of csrc/gather: who holds saved tensors is decided by the hooks that
// are active; no other logic.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "base/check.h"
#include "base/graph_task.h"
#include "gather/autograd_nodes.h"
#include "python/bindings.h"
#include "python/gather_hooks.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

using namespace gather;
using AxisPtr = std::shared_ptr<Axis>;
using Tensors = std::vector<at::Tensor>;
using Optionals = std::vector<std::optional<at::Tensor>>;

Tensors or_undefined(const Optionals& optionals) {
  Tensors tensors;
  tensors.reserve(optionals.size());
  for (const auto& optional : optionals) {
    tensors.push_back(optional.value_or(at::Tensor()));
  }
  return tensors;
}

// Inside a checkpoint, or any other hooks, these hold the gathered value: a
// recomputation has it anyway, also one that runs without hooks.
bool regathers(Axis& axis, const std::string& name, bool asked,
               ActiveHooks active) {
  const bool recomputing = base::in_backward();
  if (!asked || (active != ActiveHooks::foreign && !recomputing)) return asked;
  axis.count(name, [](Figures& figures) { ++figures.shadowed; });
  return false;
}

at::Tensor sp_all_gather(const AxisPtr& axis, const at::Tensor& shard,
                         std::string name, bool regather,
                         std::int64_t prefetch_bytes) {
  GatherOptions options{std::move(name), regather, prefetch_bytes};
  const ActiveHooks active = active_hooks();
  options.regather = regathers(*axis, options.name, regather, active);
  const auto saved = active_saved_values();
  const py::gil_scoped_release no_gil;
  Gathered gathered = all_gather(axis, shard, options);
  if (gathered.site && saved) saved->add(gathered.tensor, gathered.site);
  return gathered.tensor;
}

Tensors sp_gather_linear(const AxisPtr& axis, const at::Tensor& shard,
                         const Tensors& weights, const Optionals& biases,
                         std::string name, bool regather,
                         std::int64_t prefetch_bytes, bool addmm) {
  LinearOptions options{{std::move(name), regather, prefetch_bytes}, addmm};
  options.gather.regather =
      regathers(*axis, options.gather.name, regather, active_hooks());
  const py::gil_scoped_release no_gil;
  return gather_linear(axis, shard, weights, or_undefined(biases), options);
}

// Gradients that were not asked for are None.
py::tuple as_tuple(const LinearGradients& gradients) {
  const auto or_none = [](const at::Tensor& tensor) -> py::object {
    return tensor.defined() ? py::cast(tensor) : py::none();
  };
  const auto list = [&](const Tensors& tensors) {
    py::list result;
    for (const auto& tensor : tensors) result.append(or_none(tensor));
    return result;
  };
  return py::make_tuple(or_none(gradients.shard), list(gradients.weights),
                        list(gradients.biases));
}

py::tuple linear_backward(const AxisPtr& axis, const at::Tensor& input,
                          bool regather, const Optionals& gradients,
                          const Tensors& weights, bool needs_shard,
                          std::vector<bool> needs_weights,
                          std::vector<bool> needs_biases, bool addmm,
                          const std::string& name) {
  LinearGradients result;
  {
    const py::gil_scoped_release no_gil;
    result = gather_linear_backward(
        axis, input, regather, or_undefined(gradients), weights,
        {needs_shard, std::move(needs_weights), std::move(needs_biases)}, addmm,
        name);
  }
  return as_tuple(result);
}

py::dict figures(const Axis& axis) {
  py::dict result;
  for (const auto& [name, of_name] : axis.figures()) {
    py::dict one;
    one["gathers"] = of_name.gathers;
    one["regathers"] = of_name.regathers;
    one["prefetched"] = of_name.prefetched;
    one["unused"] = of_name.unused;
    one["shadowed"] = of_name.shadowed;
    result[py::str(name)] = one;
  }
  return result;
}

void watch(Site& site, const at::Tensor& gathered, const at::Tensor& result) {
  site.watch(gathered);
  if (result.grad_fn()) site.set_node(result.grad_fn());
}

const char* name_of(ActiveHooks active) {
  if (active == ActiveHooks::none) return "none";
  return active == ActiveHooks::ours ? "ours" : "foreign";
}

}  // namespace

void bind_gather(py::module_& module) {
  py::class_<Axis, AxisPtr>(module, "GatherAxis")
      .def(py::init<std::shared_ptr<comm::Collectives>,
                    std::shared_ptr<memory::DeviceMemory>, Axis::Compare,
                    bool>(),
           py::arg("collectives"), py::arg("memory"), py::kw_only(),
           py::arg("compare"), py::arg("compare_bits") = false)
      .def_property_readonly("size", &Axis::size)
      .def("figures", &figures)
      .def("reset_figures", &Axis::reset_figures);

  py::class_<Site, std::shared_ptr<Site>>(module, "GatherSite")
      .def(py::init([](AxisPtr axis, const at::Tensor& shard, std::string name,
                       std::int64_t prefetch_bytes) {
             return Site::make(std::move(axis), std::move(name), shard,
                               prefetch_bytes);
           }),
           py::arg("axis"), py::arg("shard"), py::arg("name"),
           py::arg("prefetch_bytes"))
      .def("watch", &watch, py::arg("gathered"), py::arg("result"))
      .def("require_unmodified", &Site::require_unmodified)
      .def("add_consumer", &Site::add_consumer)
      .def("drop_consumer", &Site::drop_consumer, py::arg("consumer"))
      .def("take", &Site::take, py::arg("consumer"),
           py::call_guard<py::gil_scoped_release>());

  module.def("push_gather_hooks", &push_gather_hooks);
  module.def("pop_gather_hooks", &pop_gather_hooks);
  module.def("active_gather_hooks", [] { return name_of(active_hooks()); });

  module.def("sp_all_gather", torch::wrap_pybind_function(&sp_all_gather),
             py::arg("axis"), py::arg("shard"), py::arg("name"), py::kw_only(),
             py::arg("regather"), py::arg("prefetch_bytes"));
  module.def("sp_reduce_scatter",
             torch::wrap_pybind_function_no_gil(
                 [](const AxisPtr& axis, const at::Tensor& partial) {
                   return reduce_scatter(axis, partial);
                 }),
             py::arg("axis"), py::arg("partial"));
  module.def("sp_gather_linear", torch::wrap_pybind_function(&sp_gather_linear),
             py::arg("axis"), py::arg("shard"), py::arg("weights"),
             py::arg("biases"), py::arg("name"), py::kw_only(),
             py::arg("regather"), py::arg("prefetch_bytes"), py::arg("addmm"));
  module.def("sp_gather_linear_forward",
             torch::wrap_pybind_function_no_gil(
                 [](const AxisPtr& axis, const at::Tensor& shard,
                    const Tensors& weights, const Optionals& biases,
                    const std::string& name, bool regather) {
                   return gather_linear_forward(axis, shard, weights,
                                                or_undefined(biases), name,
                                                regather);
                 }),
             py::arg("axis"), py::arg("shard"), py::arg("weights"),
             py::arg("biases"), py::arg("name"), py::arg("regather"));
  module.def("sp_gather_linear_backward",
             torch::wrap_pybind_function(&linear_backward), py::arg("axis"),
             py::arg("input"), py::arg("regather"), py::arg("gradients"),
             py::arg("weights"), py::arg("needs_shard"),
             py::arg("needs_weights"), py::arg("needs_biases"),
             py::arg("addmm"), py::arg("name"));
}

}  // namespace lowtide::python
