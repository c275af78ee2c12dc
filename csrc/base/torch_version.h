// What differs between the versions of torch that this tree is built for, by
// meaning: nothing else in csrc asks for torch's version.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#define LOWTIDE_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||          \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace lowtide::base {

// [Note: How a node is held]
// Up to 2.12 a node of autograd's graph is held by shared_ptr.  From 2.13 on it
// counts its references itself, and its members live until the last weak
// reference is gone, too: what leads from a node to somebody who holds it
// weakly is dropped in `release_owned`, called when the last strong reference
// goes.  There torch calls `release_variables` as well.
#if LOWTIDE_TORCH_AT_LEAST(2, 13)

template <typename T>
using SharedNode = c10::intrusive_ptr<T>;
using NodePtr = SharedNode<torch::autograd::Node>;

// With std::weak_ptr's ways.
class WeakNodePtr {
  using Weak = c10::weak_intrusive_ptr<torch::autograd::Node>;

 public:
  WeakNodePtr() = default;
  template <typename T>
  WeakNodePtr(const SharedNode<T>& node) : node_(NodePtr(node)) {}
  NodePtr lock() const { return node_.lock(); }
  bool expired() const { return node_.expired(); }
  operator Weak() const { return node_; }

 private:
  Weak node_{NodePtr()};
};

template <typename T, typename... Arguments>
SharedNode<T> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
}

class WeaklyHeldNode : public torch::autograd::Node {
 public:
  using Node::Node;
  void release_resources() final {
    release_owned();
    Node::release_resources();
  }

 protected:
  virtual void release_owned() = 0;
};

#else

template <typename T>
using SharedNode = std::shared_ptr<T>;
using NodePtr = SharedNode<torch::autograd::Node>;
using WeakNodePtr = std::weak_ptr<torch::autograd::Node>;

template <typename T, typename... Arguments>
SharedNode<T> make_node(Arguments&&... arguments) {
  return std::make_shared<T>(std::forward<Arguments>(arguments)...);
}

class WeaklyHeldNode : public torch::autograd::Node {
 public:
  using Node::Node;

 protected:
  virtual void release_owned() = 0;  // the destructor does
};

#endif

// c10d's collectives on one tensor a rank, and on lists of such, under the
// names of 2.13: std::invoke(all_gather_single, group, out, in, options).
#if LOWTIDE_TORCH_AT_LEAST(2, 13)
inline constexpr auto all_gather_single =
    &c10d::ProcessGroup::all_gather_single;
inline constexpr auto all_gather_single_coalesced =
    &c10d::ProcessGroup::all_gather_single_coalesced;
inline constexpr auto reduce_scatter_single =
    &c10d::ProcessGroup::reduce_scatter_single;
inline constexpr auto reduce_scatter_single_coalesced =
    &c10d::ProcessGroup::reduce_scatter_single_coalesced;
inline constexpr auto all_to_all_single =
    &c10d::ProcessGroup::all_to_all_single;
#else
inline constexpr auto all_gather_single = &c10d::ProcessGroup::_allgather_base;
inline constexpr auto all_gather_single_coalesced =
    &c10d::ProcessGroup::allgather_into_tensor_coalesced;
inline constexpr auto reduce_scatter_single =
    &c10d::ProcessGroup::_reduce_scatter_base;
inline constexpr auto reduce_scatter_single_coalesced =
    &c10d::ProcessGroup::reduce_scatter_tensor_coalesced;
inline constexpr auto all_to_all_single = &c10d::ProcessGroup::alltoall_base;
#endif

}  // namespace lowtide::base
