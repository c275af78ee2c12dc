// The hooks `fully_shard` registers on a module: one call each way.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>

#include "shard/unit.h"

namespace lowtide::python {

class ForwardHooks {
 public:
  struct Casts {
    std::optional<at::ScalarType> inputs;   // floating-point inputs
    std::optional<at::ScalarType> outputs;  // floating-point outputs
  };

  // `lazy_init()` is called before a forward while there is no unit or it has
  // no root, and must give it one.
  ForwardHooks(Casts casts, pybind11::object lazy_init);

  void set_unit(std::shared_ptr<shard::Unit> unit) { unit_ = std::move(unit); }

  // Moves the root's inputs to this device before everything else.
  void move_inputs_to(c10::Device device) { device_ = device; }

  // nn.Module.register_forward_pre_hook(with_kwargs=True): returns
  // (args, kwargs), or None when both are unchanged.
  pybind11::object pre(pybind11::handle module, pybind11::handle args,
                       pybind11::handle kwargs);
  // nn.Module.register_forward_hook: returns the output, or None when it is
  // unchanged.
  pybind11::object post(pybind11::handle module, pybind11::handle args,
                        pybind11::handle output);

 private:
  pybind11::object prepare_inputs(pybind11::handle tree) const;

  std::shared_ptr<shard::Unit> unit_;
  Casts casts_;
  pybind11::object lazy_init_;
  std::optional<c10::Device> device_;
};

}  // namespace lowtide::python
