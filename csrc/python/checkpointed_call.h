// Calls of one checkpointed module: runs the forward in a frame, and again when
// backward asks.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "activation/frame.h"
#include "activation/region.h"

namespace lowtide::python {

// Python's part in a region.
struct RegionCallbacks {
  // The module's own `__call__`, unbound.
  pybind11::object call;
  // () -> a context manager that the forward runs in and that must surround a
  // recomputation too, or None.  Asked when a torch function mode is active.
  pybind11::object surroundings;
  // Context managers that see every operator of a forward with the tensor
  // arguments `inputs`: (frame, inputs) before one whose interior values are
  // named; it has `skips`, which (frame, inputs, num_saved, skips) replays,
  // where num_saved() says how many tensors were saved so far.  Told by
  // `finish()` that the recomputation came to its end.
  pybind11::object recorder;
  pybind11::object replayer;
  // (module, tensor) -> whether it shows bytes of a parameter or buffer.
  pybind11::object is_state;
  // (module) -> where its parameters are.
  pybind11::object device_of;
  // (module) -> whether it need not be told again, in each backward that
  // computes it again until then.
  pybind11::object first_backward;
};

class CheckpointedCall {
 public:
  CheckpointedCall(std::shared_ptr<activation::Region> region,
                   RegionCallbacks callbacks);

  const std::shared_ptr<activation::Region>& region() const { return region_; }

  pybind11::object run(pybind11::handle module, const pybind11::tuple& args,
                       const pybind11::dict& kwargs);

 private:
  class PythonReplay;

  std::shared_ptr<activation::Region> region_;
  std::shared_ptr<RegionCallbacks> callbacks_;
};

}  // namespace lowtide::python
