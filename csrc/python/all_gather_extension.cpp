#include "python/all_gather_extension.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace py = pybind11;

namespace lowtide::python {
namespace {

std::vector<at::Tensor> tensors_in(const py::handle& list) {
  std::vector<at::Tensor> tensors;
  for (const auto tensor : list) {
    tensors.push_back(THPVariable_Unpack(tensor.ptr()));
  }
  return tensors;
}

}  // namespace

PyAllGatherExtension::PyAllGatherExtension(py::object inputs,
                                           py::object arrived,
                                           py::object passing)
    : inputs_(std::move(inputs)),
      arrived_(std::move(arrived)),
      passing_(std::move(passing)) {}

PyAllGatherExtension::~PyAllGatherExtension() {
  const py::gil_scoped_acquire gil;
  inputs_ = arrived_ = passing_ = py::object();
}

std::vector<at::Tensor> PyAllGatherExtension::inputs() {
  const py::gil_scoped_acquire gil;
  return tensors_in(inputs_());
}

std::vector<bool> PyAllGatherExtension::passing() {
  const py::gil_scoped_acquire gil;
  std::vector<bool> passing;
  for (const auto flag : py::list(passing_())) {
    passing.push_back(flag.cast<bool>());
  }
  return passing;
}

PyAllGatherExtension::Made PyAllGatherExtension::arrived(
    const std::vector<at::Tensor>& gathered, bool from_parts) {
  const py::gil_scoped_acquire gil;
  py::list tensors;
  for (const auto& tensor : gathered) {
    tensors.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
  }
  const py::tuple made = arrived_(tensors, from_parts);
  return {tensors_in(made[0]), tensors_in(made[1])};
}

}  // namespace lowtide::python
