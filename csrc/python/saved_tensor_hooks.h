// torch's default saved-tensor hooks, with both sides in C++.
//
// torch only takes Python callables.  These are built-in functions over
// capsules: no Python frame, no argument parsing, and no pybind11 dispatch, of
// which a region would pay three for every saved tensor.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "activation/frame.h"

namespace lowtide::python {

// While alive, tensors autograd saves on this thread are packed by `frame`.
class ForwardSavedTensors {
 public:
  explicit ForwardSavedTensors(std::shared_ptr<activation::Frame> frame);
  ~ForwardSavedTensors();
  ForwardSavedTensors(const ForwardSavedTensors&) = delete;
  ForwardSavedTensors& operator=(const ForwardSavedTensors&) = delete;
};

// While alive, they go to `recomputation`; when that needs no more, the
// operator that saved the last one raises `StopRecomputation`.
class RecomputedSavedTensors {
 public:
  explicit RecomputedSavedTensors(activation::Recomputation& recomputation);
  ~RecomputedSavedTensors();
  RecomputedSavedTensors(const RecomputedSavedTensors&) = delete;
  RecomputedSavedTensors& operator=(const RecomputedSavedTensors&) = delete;

  // Whether `error` is the one raised here.
  bool stopped_by(const pybind11::error_already_set& error) const;

  struct Target;  // what the hooks hold

 private:
  std::shared_ptr<Target> target_;
};

// lowtide._C.StopRecomputation, a BaseException: user code that catches
// Exception does not swallow it.
void bind_stop_recomputation(pybind11::module_& module);

}  // namespace lowtide::python
