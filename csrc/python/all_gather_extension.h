// All-gather extensions written in Python.  Takes the GIL where it needs it.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "shard/parameters/all_gather_extension.h"

namespace lowtide::python {

class PyAllGatherExtension final : public shard::AllGatherExtension {
 public:
  // `inputs() -> list[Tensor]`,
  // `arrived(gathered, from_parts) -> (list[Parameter], list[Tensor])`,
  // `passing() -> list[bool]`.
  PyAllGatherExtension(pybind11::object inputs, pybind11::object arrived,
                       pybind11::object passing);
  ~PyAllGatherExtension() override;

  std::vector<at::Tensor> inputs() override;
  std::vector<bool> passing() override;
  Made arrived(const std::vector<at::Tensor>& gathered,
               bool from_parts) override;

 private:
  pybind11::object inputs_;
  pybind11::object arrived_;
  pybind11::object passing_;
};

}  // namespace lowtide::python
