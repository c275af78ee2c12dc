// The unit's face on Python modules: swaps `module._parameters` entries and
// asks Python to wrap gradients.  Takes the GIL where it needs it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "shard/parameters/module_view.h"

namespace lowtide::python {

class PyModuleView final : public shard::ModuleView {
 public:
  // One place a parameter is registered: module._parameters, name, index.
  struct Slot {
    pybind11::dict parameters;
    pybind11::str name;
    std::int32_t index;
  };

  // `wrap(indices, locals) -> list[DTensor]`, `unwrap(index, grad) -> Tensor`,
  // `refuse(index, name)` raises: a slot has neither form of its parameter.
  PyModuleView(std::vector<Slot> slots, std::vector<pybind11::object> shards,
               std::vector<pybind11::object> full, pybind11::object wrap,
               pybind11::object unwrap, pybind11::object refuse);
  ~PyModuleView() override;

  void show_full() override;
  void show_shards() override;
  void replace_full(std::int32_t parameter, const at::Tensor& full) override;
  std::vector<at::Tensor> wrap_gradients(
      const std::vector<std::int32_t>& parameters,
      const std::vector<at::Tensor>& locals) override;
  at::Tensor local_gradient(std::int32_t parameter,
                            const at::Tensor& gradient) override;
  // Reads and resets `grad_added_to_main_grad` of the full parameter.
  MainGradientUse took_main_gradient(std::int32_t parameter) override;
  // A Python function called zero_grad is reading.
  Clears clears_gradients() const override;
  // A Python function of torch's, or lowtide's, that clips or unscales is.
  Misses misses_gradients() const override;

 private:
  void show(const std::vector<pybind11::object>& parameters);
  bool has_other(const Slot& slot) const;

  std::vector<Slot> slots_;
  std::vector<pybind11::object> shards_;
  std::vector<pybind11::object> full_;
  pybind11::object wrap_;
  pybind11::object unwrap_;
  pybind11::object refuse_;
};

}  // namespace lowtide::python
