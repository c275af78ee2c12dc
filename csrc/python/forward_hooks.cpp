#include "python/forward_hooks.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "python/tensor_tree.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.is_floating_point() && tensor.scalar_type() != dtype
             ? tensor.to(dtype)
             : tensor;
}

// torch.func's derivatives have graphs of their own, which a unit's nodes and
// hooks see nothing of.
void refuse_func_derivatives(const std::string& unit) {
  using c10::DispatchKey;
  if (!c10::impl::tls_is_dispatch_key_included(
          DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return;
  }
  const auto stack = py::module_::import("torch._C._functorch")
                         .attr("get_interpreter_stack")();
  if (stack.is_none()) return;
  for (const auto& interpreter : stack) {
    const auto kind =
        interpreter.attr("key")().attr("name").cast<std::string>();
    if (kind == "Grad" || kind == "Jvp") {
      throw Error(base::error_text(
          base::concat("unit '", unit, "'"),
          "a forward outside of torch.func's derivatives",
          "one inside torch.func.grad, vjp, jacrev or the like",
          "Use torch.autograd.grad, with create_graph=True for derivatives of "
          "derivatives, or torch.autograd.forward_ad."));
    }
  }
}

}  // namespace

ForwardHooks::ForwardHooks(Casts casts, py::object lazy_init,
                           const std::vector<py::object>& modules)
    : casts_(casts), lazy_init_(std::move(lazy_init)) {
  for (const auto& module : modules) {
    modules_.push_back(module.ptr());
  }
}

void ForwardHooks::set_unit(std::shared_ptr<shard::Unit> unit) {
  unit_ = std::move(unit);
}

std::size_t ForwardHooks::place_of(py::handle module) const {
  const auto found = std::find(modules_.begin(), modules_.end(), module.ptr());
  return found == modules_.end()
             ? 0
             : static_cast<std::size_t>(found - modules_.begin());
}

py::object ForwardHooks::prepare_inputs(py::handle tree, bool cast) const {
  cast = cast && casts_.inputs;
  if (!device_ && !cast) {
    return py::reinterpret_borrow<py::object>(tree);
  }
  return map_tensors(tree, [this, cast](const at::Tensor& input) {
    auto tensor = input;
    if (device_ && tensor.device() != *device_) {
      // Blocks, as FSDP2 does: the user may fill a page-locked buffer again.
      tensor = tensor.to(*device_, tensor.scalar_type());
    }
    return cast ? cast_floating(tensor, *casts_.inputs) : tensor;
  });
}

py::object ForwardHooks::pre(py::handle module, py::handle args,
                             py::handle kwargs) {
  if (unit_) refuse_func_derivatives(unit_->name());
  if (!unit_ || !unit_->root() || std::exchange(look_again_, false)) {
    lazy_init_();
  }
  const auto place = place_of(module);
  shard::Unit::ForwardCall call;
  {
    const py::gil_scoped_release no_gil;
    call = unit_->pre_forward(place);
  }
  const bool casts = call.begins || casts_.of_each;
  py::object new_args = prepare_inputs(args, casts);
  py::object new_kwargs = prepare_inputs(kwargs, casts);
  if (call.watch_inputs && at::GradMode::is_enabled()) {
    auto inputs = tensors_requiring_grad(new_args);
    const auto from_kwargs = tensors_requiring_grad(new_kwargs);
    inputs.insert(inputs.end(), from_kwargs.begin(), from_kwargs.end());
    if (!inputs.empty()) {
      const auto watched = unit_->watch_forward_inputs(inputs);
      // Both walks meet the same tensors in the same order.
      std::size_t next = 0;
      const auto replace = [&](const at::Tensor& input) {
        return next < inputs.size() && input.is_same(inputs[next])
                   ? watched[next++]
                   : input;
      };
      new_args = map_tensors(new_args, replace);
      new_kwargs = map_tensors(new_kwargs, replace);
    }
  }
  if (new_args.is(args) && new_kwargs.is(kwargs)) {
    return py::none();
  }
  return py::make_tuple(std::move(new_args), std::move(new_kwargs));
}

py::object ForwardHooks::post(py::handle module, py::handle /*args*/,
                              py::handle output, bool casts_output) {
  std::vector<at::Tensor> watched;
  if (at::GradMode::is_enabled()) {
    watched = tensors_requiring_grad(output);
  }
  const auto place = place_of(module);
  bool ends = false;
  {
    const py::gil_scoped_release no_gil;
    ends = unit_->post_forward(watched, place);
  }
  if (!casts_output || !(ends || casts_.of_each) || !casts_.outputs) {
    return py::none();
  }
  py::object cast = map_tensors(output, [this](const at::Tensor& tensor) {
    return cast_floating(tensor, *casts_.outputs);
  });
  return cast.is(output) ? py::none() : cast;
}

}  // namespace lowtide::python
