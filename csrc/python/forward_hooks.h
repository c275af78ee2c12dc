// The hooks `fully_shard` registers on a module: one call each way.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <vector>

#include "shard/unit.h"

namespace lowtide::python {

class ForwardHooks {
 public:
  struct Casts {
    std::optional<at::ScalarType> inputs;   // floating-point inputs
    std::optional<at::ScalarType> outputs;  // floating-point outputs
    // Of every module where there are several; else as FSDP2 did before torch
    // 2.13, of the first one's inputs and the last one's outputs.
    bool of_each = false;
  };

  // `lazy_init()` is called before a forward while there is no unit or it has
  // no root, and must give it one.  `modules`: those that the hooks are for,
  // which must outlive them where there are several.
  ForwardHooks(Casts casts, pybind11::object lazy_init,
               const std::vector<pybind11::object>& modules);

  void set_unit(std::shared_ptr<shard::Unit> unit);
  // Calls `lazy_init()` before the next forward, too.
  void look_again() { look_again_ = true; }

  // Moves the root's inputs to this device before everything else.
  void move_inputs_to(c10::Device device) { device_ = device; }

  // nn.Module.register_forward_pre_hook(with_kwargs=True): returns
  // (args, kwargs), or None when both are unchanged.
  pybind11::object pre(pybind11::handle module, pybind11::handle args,
                       pybind11::handle kwargs);
  // nn.Module.register_forward_hook: returns the output, or None when it is
  // unchanged.  `casts_output`: to the outputs' dtype, if there is one.
  pybind11::object post(pybind11::handle module, pybind11::handle args,
                        pybind11::handle output, bool casts_output);

 private:
  pybind11::object prepare_inputs(pybind11::handle tree, bool cast) const;
  std::size_t place_of(pybind11::handle module) const;

  std::shared_ptr<shard::Unit> unit_;
  Casts casts_;
  pybind11::object lazy_init_;
  std::vector<PyObject*> modules_;
  bool look_again_ = false;
  std::optional<c10::Device> device_;
};

}  // namespace lowtide::python
