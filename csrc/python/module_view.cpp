#include "python/module_view.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <initializer_list>

#include "base/check.h"

namespace py = pybind11;

namespace lowtide::python {

PyModuleView::PyModuleView(std::vector<Slot> slots,
                           std::vector<py::object> shards,
                           std::vector<py::object> full, py::object wrap,
                           py::object unwrap, py::object refuse)
    : slots_(std::move(slots)),
      shards_(std::move(shards)),
      full_(std::move(full)),
      wrap_(std::move(wrap)),
      unwrap_(std::move(unwrap)),
      refuse_(std::move(refuse)) {}

PyModuleView::~PyModuleView() {
  const py::gil_scoped_acquire gil;
  slots_.clear();
  shards_.clear();
  full_.clear();
  wrap_ = unwrap_ = refuse_ = py::object();
}

void PyModuleView::show(const std::vector<py::object>& parameters) {
  const py::gil_scoped_acquire gil;
  for (const auto& slot : slots_) {
    if (PyDict_SetItem(
            slot.parameters.ptr(), slot.name.ptr(),
            parameters[static_cast<std::size_t>(slot.index)].ptr()) != 0) {
      throw py::error_already_set();
    }
  }
}

bool PyModuleView::has_other(const Slot& slot) const {
  const auto i = static_cast<std::size_t>(slot.index);
  const auto* there =
      PyDict_GetItemWithError(slot.parameters.ptr(), slot.name.ptr());
  return there != shards_[i].ptr() && there != full_[i].ptr();
}

// What the user has put into a parameter's place must not be lost.
void PyModuleView::show_full() {
  const py::gil_scoped_acquire gil;
  for (const auto& slot : slots_) {
    if (has_other(slot)) refuse_(slot.index, slot.name);
  }
  show(full_);
}

void PyModuleView::show_shards() { show(shards_); }

void PyModuleView::replace_full(std::int32_t parameter,
                                const at::Tensor& full) {
  const py::gil_scoped_acquire gil;
  full_[static_cast<std::size_t>(parameter)] =
      py::reinterpret_steal<py::object>(THPVariable_Wrap(full));
}

std::vector<at::Tensor> PyModuleView::wrap_gradients(
    const std::vector<std::int32_t>& parameters,
    const std::vector<at::Tensor>& locals) {
  const py::gil_scoped_acquire gil;
  py::list indices;
  for (const auto i : parameters) {
    indices.append(i);
  }
  py::list tensors;
  for (const auto& local : locals) {
    tensors.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(local)));
  }
  std::vector<at::Tensor> wrapped;
  for (const auto gradient : wrap_(indices, tensors)) {
    wrapped.push_back(THPVariable_Unpack(gradient.ptr()));
  }
  return wrapped;
}

PyModuleView::MainGradientUse PyModuleView::took_main_gradient(
    std::int32_t parameter) {
  const py::gil_scoped_acquire gil;
  const auto& full = full_[static_cast<std::size_t>(parameter)];
  const auto says = [&](const char* name) {
    return py::bool_(py::getattr(full, name, py::bool_(false))).cast<bool>();
  };
  if (!says("grad_added_to_main_grad")) {
    return {};
  }
  full.attr("grad_added_to_main_grad") = false;
  return {true, says("zero_out_wgrad")};
}

at::Tensor PyModuleView::local_gradient(std::int32_t parameter,
                                        const at::Tensor& gradient) {
  const py::gil_scoped_acquire gil;
  const auto wrapped =
      py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
  return THPVariable_Unpack(unwrap_(parameter, wrapped).ptr());
}

namespace {

// The name of the innermost `depth` frames' functions that is one of `names`.
const char* running(std::initializer_list<const char*> names, int deepest) {
  if (PyGILState_Check() == 0) {
    return nullptr;
  }
  auto frame = py::reinterpret_borrow<py::object>(
      reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  for (int depth = 0; frame && depth < deepest; ++depth) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const py::object name = code.attr("co_name");
    for (const auto* one : names) {
      if (name.equal(py::str(one))) return one;
    }
    frame = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return nullptr;
}

// As a module's, an optimizer's, or something that they call for a parameter.
bool zero_grad_reads() { return running({"zero_grad"}, 2) != nullptr; }

// In a comprehension, and by way of a property of lowtide's.
void refuse_to_clip() {
  const auto* const who =
      running({"clip_grad_norm_", "clip_grad_value_", "_unscale_grads_"}, 3);
  if (who == nullptr) return;
  throw Error(base::error_text(
      who, "gradients behind the backward",
      "a model whose optimizer steps in backward and has taken them",
      "Give lowtide.optimize_in_backward max_norm= to clip; it does not go "
      "together with GradScaler."));
}

}  // namespace

shard::ModuleView::Clears PyModuleView::clears_gradients() const {
  return &zero_grad_reads;
}

shard::ModuleView::Misses PyModuleView::misses_gradients() const {
  return &refuse_to_clip;
}

}  // namespace lowtide::python
