#include "python/module_view.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace lowtide::python {

PyModuleView::PyModuleView(std::vector<Slot> slots,
                           std::vector<py::object> shards,
                           std::vector<py::object> full, py::object wrap,
                           py::object unwrap)
    : slots_(std::move(slots)),
      shards_(std::move(shards)),
      full_(std::move(full)),
      wrap_(std::move(wrap)),
      unwrap_(std::move(unwrap)) {}

PyModuleView::~PyModuleView() {
  const py::gil_scoped_acquire gil;
  slots_.clear();
  shards_.clear();
  full_.clear();
  wrap_ = unwrap_ = py::object();
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

void PyModuleView::show_full() { show(full_); }

void PyModuleView::show_shards() { show(shards_); }

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

}  // namespace lowtide::python
