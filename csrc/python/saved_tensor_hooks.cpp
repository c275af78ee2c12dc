#include "python/saved_tensor_hooks.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <typeinfo>
#include <utility>
#include <vector>

#include "base/graph_task.h"
#include "python/hook_functions.h"

namespace py = pybind11;

namespace lowtide::python {

struct RecomputedSavedTensors::Target {
  activation::Recomputation* recomputation;  // null after the recomputation
  // What the graph of the recomputation saved.  It holds places in here: with
  // the tensors themselves, an operator's output would hold its own node.
  std::vector<at::Tensor> saved;
  bool stopped = false;
};

namespace {

using FramePtr = std::shared_ptr<activation::Frame>;
using TargetPtr = std::shared_ptr<RecomputedSavedTensors::Target>;

// What the node that saved a tensor holds in its place.
struct Token {
  FramePtr frame;
  std::size_t place;
  ~Token() { frame->drop(place); }
};

PyObject*& stop_type() {
  static PyObject* type = PyErr_NewException("lowtide._C.StopRecomputation",
                                             PyExc_BaseException, nullptr);
  return type;
}

PyObject* pack_forward(PyObject* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  const FramePtr& frame = value_of<FramePtr>(self);
  const std::size_t place = frame->pack(THPVariable_Unpack(tensor));
  return capsule_of(std::unique_ptr<Token>(new Token{frame, place}))
      .release()
      .ptr();
  END_HANDLE_TH_ERRORS
}

bool is_python_function(const torch::autograd::Node& node) {
  // torch does not export the type.
  return c10::demangle(typeid(node).name()) == "torch::autograd::PyNode";
}

// Whether the backward under way is to be differentiated itself.  The engine
// runs nodes with grad mode as create_graph says, but the backward of a Python
// function may have switched it on for its own use: create_graph keeps the
// graph, unless told otherwise.
bool creates_graph() {
  if (!at::GradMode::is_enabled()) return false;
  const auto node = torch::autograd::get_current_node();
  return !node || !is_python_function(*node) || base::graph_task_keeps_graph();
}

PyObject* unpack_forward(PyObject* /*self*/, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const Token& token = value_of<Token>(capsule);
  return THPVariable_Wrap(token.frame->unpack(token.place, creates_graph()));
  END_HANDLE_TH_ERRORS
}

PyObject* pack_recomputed(PyObject* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  auto& target = *value_of<TargetPtr>(self);
  target.saved.push_back(
      activation::without_history(THPVariable_Unpack(tensor)));
  if (target.recomputation != nullptr &&
      target.recomputation->pack(target.saved.back())) {
    target.stopped = true;
    PyErr_SetNone(stop_type());
    return nullptr;
  }
  return PyLong_FromSize_t(target.saved.size() - 1);
  END_HANDLE_TH_ERRORS
}

// Only if the forward itself takes gradients.
PyObject* unpack_recomputed(PyObject* self, PyObject* place) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(
      value_of<TargetPtr>(self)->saved.at(PyLong_AsSize_t(place)));
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_forward_def = {"pack", &pack_forward, METH_O, nullptr};
PyMethodDef unpack_forward_def = {"unpack", &unpack_forward, METH_O, nullptr};
PyMethodDef pack_recomputed_def = {"pack", &pack_recomputed, METH_O, nullptr};
PyMethodDef unpack_recomputed_def = {"unpack", &unpack_recomputed, METH_O,
                                     nullptr};

}  // namespace

ForwardSavedTensors::ForwardSavedTensors(FramePtr frame) {
  const py::object self =
      capsule_of(std::make_unique<FramePtr>(std::move(frame)));
  push_hooks(function_of(&pack_forward_def, self.ptr()),
             function_of(&unpack_forward_def, nullptr));
}

ForwardSavedTensors::~ForwardSavedTensors() {
  at::SavedTensorDefaultHooks::pop_hooks();
}

RecomputedSavedTensors::RecomputedSavedTensors(
    activation::Recomputation& recomputation)
    : target_(std::make_shared<Target>(Target{&recomputation, {}})) {
  const py::object self = capsule_of(std::make_unique<TargetPtr>(target_));
  push_hooks(function_of(&pack_recomputed_def, self.ptr()),
             function_of(&unpack_recomputed_def, self.ptr()));
}

RecomputedSavedTensors::~RecomputedSavedTensors() {
  at::SavedTensorDefaultHooks::pop_hooks();
  target_->recomputation = nullptr;
}

bool RecomputedSavedTensors::stopped_by(
    const py::error_already_set& error) const {
  return target_->stopped && error.matches(stop_type());
}

void bind_stop_recomputation(py::module_& module) {
  module.attr("StopRecomputation") =
      py::reinterpret_borrow<py::object>(stop_type());
}

}  // namespace lowtide::python
