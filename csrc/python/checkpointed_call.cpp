#include "python/checkpointed_call.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>

#include "python/argument_tree.h"
#include "python/saved_tensor_hooks.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

using activation::Frame;

py::object call_module(const py::object& call, py::handle module,
                       py::handle args, py::handle kwargs) {
  const Py_ssize_t size = PyTuple_GET_SIZE(args.ptr());
  py::tuple all(size + 1);
  all[0] = module;
  for (Py_ssize_t i = 0; i < size; ++i) {
    all[i + 1] =
        py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(args.ptr(), i));
  }
  PyObject* const result = PyObject_Call(call.ptr(), all.ptr(), kwargs.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// `with manager:`; does nothing for None.
class With {
 public:
  explicit With(py::object manager) : manager_(std::move(manager)) {
    if (manager_ && !manager_.is_none()) manager_.attr("__enter__")();
  }
  ~With() {
    if (!manager_ || manager_.is_none()) return;
    // An exception may be on its way through here.
    const py::error_scope pending;
    try {
      manager_.attr("__exit__")(py::none(), py::none(), py::none());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("lowtide: leaving a region");
    }
  }
  With(const With&) = delete;
  With& operator=(const With&) = delete;

 private:
  py::object manager_;
};

// Code of a model that is compiled as a whole runs eagerly in its regions: a
// recomputation would not find the compiler active, and save other tensors.
// Modules that are compiled themselves stay so.
class WithoutOuterCompiler {
 public:
  WithoutOuterCompiler()
      : frames_(py::module_::import("torch._C._dynamo.eval_frame")),
        callback_(frames_.attr("get_eval_frame_callback")()) {
    if (!callback_.is_none()) frames_.attr("set_eval_frame")(py::none());
  }
  ~WithoutOuterCompiler() {
    if (callback_.is_none()) return;
    const py::error_scope pending;
    frames_.attr("set_eval_frame")(callback_);
  }
  WithoutOuterCompiler(const WithoutOuterCompiler&) = delete;
  WithoutOuterCompiler& operator=(const WithoutOuterCompiler&) = delete;

 private:
  py::module_ frames_;
  py::object callback_;
};

py::object surroundings_of(const RegionCallbacks& callbacks) {
  if (at::impl::PythonTorchFunctionTLS::stack_len() == 0) return py::none();
  return callbacks.surroundings();
}

}  // namespace

// Destroyed with its frame, under the GIL or not.
class CheckpointedCall::PythonReplay final : public activation::Replay {
 public:
  // Appends the call's tensors to `tensors`.
  PythonReplay(std::shared_ptr<RegionCallbacks> callbacks, py::handle module,
               py::handle args, py::handle kwargs,
               std::vector<at::Tensor>& tensors)
      : callbacks_(std::move(callbacks)),
        state_(State{py::reinterpret_borrow<py::object>(module),
                     ArgumentTree(args, tensors), ArgumentTree(kwargs, tensors),
                     surroundings_of(*callbacks_), py::none()}) {}

  ~PythonReplay() override {
    const py::gil_scoped_acquire gil;
    state_.reset();
    callbacks_.reset();
  }

  c10::Device device() const override {
    if (!at::getAccelerator()) return c10::Device(c10::kCPU);
    return callbacks_->device_of(state_->module).cast<c10::Device>();
  }

  void run(const std::vector<at::Tensor>& inputs,
           activation::Recomputation& recomputation) override {
    const py::gil_scoped_acquire gil;
    if (forward_ended_ && !callbacks_->first_backward.is_none()) {
      const auto first = callbacks_->first_backward;
      if (first(state_->module).cast<bool>()) {
        callbacks_->first_backward = py::none();
      }
    }
    const WithoutOuterCompiler eager;
    const With surroundings(state_->surroundings);
    const py::object replayer =
        state_->skips.is_none()
            ? py::none()
            : callbacks_->replayer(
                  frame_.lock(), inputs,
                  py::cpp_function([passed = recomputation.shared_from_this()] {
                    return passed->num_packed();
                  }),
                  state_->skips);
    const py::object args = state_->args.with(inputs);
    const py::object kwargs = state_->kwargs.with(inputs);
    const RecomputedSavedTensors saved(recomputation);
    try {
      const With replaying(replayer);
      call_module(callbacks_->call, state_->module, args, kwargs);
    } catch (py::error_already_set& error) {
      if (!saved.stopped_by(error)) throw;
    }
    if (!replayer.is_none()) {
      replayer.attr("finish")();
    }
  }

  // The forward may be computed again before, for gradients that it takes.
  void end_forward() { forward_ended_ = true; }

  void skip(std::weak_ptr<Frame> frame, py::object skips) {
    frame_ = std::move(frame);
    state_->skips = std::move(skips);
  }

 private:
  struct State {
    py::object module;
    ArgumentTree args;
    ArgumentTree kwargs;
    py::object surroundings;
    py::object skips;
  };
  std::shared_ptr<RegionCallbacks> callbacks_;
  std::optional<State> state_;
  std::weak_ptr<Frame> frame_;
  bool forward_ended_ = false;
};

CheckpointedCall::CheckpointedCall(std::shared_ptr<activation::Region> region,
                                   RegionCallbacks callbacks)
    : region_(std::move(region)),
      callbacks_(std::make_shared<RegionCallbacks>(std::move(callbacks))) {}

py::object CheckpointedCall::run(py::handle module, const py::tuple& args,
                                 const py::dict& kwargs) {
  if (!at::GradMode::is_enabled()) {
    return call_module(callbacks_->call, module, args, kwargs);
  }
  const WithoutOuterCompiler eager;
  if (!region_->policy().names.empty()) {
    region_->is_state = [module = py::weakref(module),
                         callbacks = callbacks_](const at::Tensor& tensor) {
      return callbacks->is_state(module(), tensor).cast<bool>();
    };
  }
  std::vector<at::Tensor> tensors;
  auto made =
      std::make_unique<PythonReplay>(callbacks_, module, args, kwargs, tensors);
  PythonReplay& replay = *made;
  const auto frame = std::make_shared<Frame>(region_, tensors, std::move(made));
  py::object recorder = py::none();
  if (region_->watches_interior && !frame->nested_recomputation()) {
    recorder = callbacks_->recorder(frame, tensors);
  }
  tensors.clear();
  py::object result;
  {
    const Frame::Scope scope(*frame, /*recomputing=*/false);
    const ForwardSavedTensors saved(frame);
    const With watching(recorder);
    result = call_module(callbacks_->call, module, args, kwargs);
  }
  frame->end_forward();
  replay.end_forward();
  if (!recorder.is_none()) replay.skip(frame, recorder.attr("skips"));
  return result;
}

}  // namespace lowtide::python
