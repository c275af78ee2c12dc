// A call's arguments with the tensors taken out, so that whoever keeps the
// rest keeps no tensor alive, and put back when the call is repeated.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "python/container.h"

namespace lowtide::python {

class ArgumentTree {
 public:
  // Appends the tensors in `tree` to `tensors`, in walking order.  Tuples,
  // lists and dicts are walked here, what is registered with torch's pytree
  // there; other objects are kept as they are, tensors inside included.
  ArgumentTree(pybind11::handle tree, std::vector<at::Tensor>& tensors);

  // The tree over other tensors, numbered as the constructor saw them.
  pybind11::object with(const std::vector<at::Tensor>& tensors) const;

 private:
  ArgumentTree() = default;
  void read(pybind11::handle tree, std::vector<at::Tensor>& tensors);
  void read_pytree(pybind11::handle tree, std::vector<at::Tensor>& tensors);
  void read_items(pybind11::handle items, TreeKind kind,
                  std::vector<at::Tensor>& tensors);

  // `other` is what is registered with torch's pytree, `plain` any object that
  // is kept as it is.
  TreeKind kind_ = TreeKind::plain;
  std::size_t tensor_ = 0;
  pybind11::object object_;  // the object, a dict's keys, or a pytree's spec
  std::vector<ArgumentTree> children_;
};

}  // namespace lowtide::python
