#include "python/tensor_tree.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "python/container.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

py::object wrap(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

py::object map_items(py::handle tree, TreeKind kind, const TensorMap& map) {
  auto items = items_of(tree, kind);
  bool changed = false;
  for (auto& item : items) {
    py::object mapped = map_tensors(item, map);
    changed |= !mapped.is(item);
    item = std::move(mapped);
  }
  return changed ? container_of(kind, tree, std::move(items))
                 : py::reinterpret_borrow<py::object>(tree);
}

// Their values, in the order in which torch's _apply_to_tensors maps them.
std::vector<py::object> dataclass_fields(py::handle object) {
  std::vector<py::object> values;
  const auto fields = py::module_::import("dataclasses").attr("fields")(object);
  for (const auto field : fields) {
    values.push_back(object.attr(field.attr("name")));
  }
  return values;
}

}  // namespace

py::object map_tensors(py::handle tree, const TensorMap& map) {
  const auto kind = kind_of(tree.ptr());
  if (kind == TreeKind::tensor) {
    const auto& tensor = THPVariable_Unpack(tree.ptr());
    auto mapped = map(tensor);
    return mapped.is_same(tensor) ? py::reinterpret_borrow<py::object>(tree)
                                  : wrap(mapped);
  }
  if (kind == TreeKind::plain) return py::reinterpret_borrow<py::object>(tree);
  if (kind != TreeKind::other) return map_items(tree, kind, map);
  const auto apply =
      py::module_::import("torch.distributed.utils").attr("_apply_to_tensors");
  return apply(py::cpp_function([&map](const py::object& leaf) {
                 return map_tensors(leaf, map);
               }),
               tree);
}

std::vector<at::Tensor> tensors_requiring_grad(py::handle tree) {
  std::vector<at::Tensor> found;
  const std::function<void(py::handle)> visit = [&](py::handle node) {
    const auto kind = kind_of(node.ptr());
    if (kind == TreeKind::tensor) {
      const auto& tensor = THPVariable_Unpack(node.ptr());
      if (tensor.requires_grad()) {
        found.push_back(tensor);
      }
    } else if (kind == TreeKind::other) {
      const auto leaves =
          py::module_::import("torch.utils._pytree").attr("tree_leaves")(node);
      for (const auto leaf : leaves) {
        if (THPVariable_Check(leaf.ptr())) {
          visit(leaf);
        } else if (py::hasattr(py::type::of(leaf), "__dataclass_fields__")) {
          // One that pytree has not been told of.
          for (const auto& field : dataclass_fields(leaf)) visit(field);
        }
      }
    } else if (kind != TreeKind::plain) {
      for (const auto& item : items_of(node, kind)) visit(item);
    }
  };
  visit(tree);
  return found;
}

}  // namespace lowtide::python
