// Weight gradients of a unit that are summed where they are sent from, by the
// layers' own products: see docs/design/fused_gradients.md.
//
// A layer offers its product (linear_node.h, or compiled code) instead of a
// gradient, or adds to `main_gradient` by itself (Megatron's and
// TransformerEngine's layers).  What none of them added comes through autograd
// as ever and is added behind it.
//
// Threads: one at a time.  Streams: compute's order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory/device_memory.h"
#include "shard/gradients/gradient_stream.h"
#include "shard/gradients/unit_gradients.h"
#include "shard/graph/autograd_nodes.h"
#include "shard/graph/weight_owners.h"
#include "shard/parameters/parameter_leaves.h"
#include "shard/storage.h"

namespace lowtide::shard {

// How often a layer's product was added in place, and how often autograd had to
// see it.
struct FusedUses {
  std::int64_t added = 0;
  std::int64_t hooks = 0;
  std::int64_t asked_for = 0;
  std::int64_t recorded = 0;
  std::int64_t elsewhere = 0;  // on another stream
  std::int64_t repeated = 0;   // a second use in one backward
  // Backwards that brought a gradient and offered no product.
  std::int64_t unseen = 0;
  // Forwards that left their call to autograd at once, by why.
  std::map<std::string, std::int64_t> refused;

  // How many of the unseen no refused forward explains.
  std::int64_t unexplained() const;
};

class FusedGradients {
 public:
  // `layout` and `gradients` outlive it.
  FusedGradients(UnitName unit, ParameterInfos infos,
                 const memory::FlatLayout& layout, UnitGradients& gradients,
                 std::shared_ptr<memory::DeviceMemory> memory);

  // Which parameters' gradients are summed in place, from the next plan on.
  // Between steps, with none accumulated; the same on every rank.  Returns
  // whether that has changed.
  bool choose(const std::vector<bool>& fused);
  // Lets compiled code find the owner of a weight by its storage.
  void list(const ParameterLeaves& leaves);
  // What became of each parameter's products so far.
  const std::vector<FusedUses>& uses() const { return uses_; }

  // The forward of parameter i's layer leaves a call to autograd.
  void refuse(std::int32_t i, const std::string& why);

  // A backward of the unit begins.
  void begin_backward();

  // In the following, `stream`: null in a backward without sync.
  //
  // Whether parameter i's product may be added now, in a backward that
  // `obstacle` is known of; counts why not.
  bool admits(std::int32_t i, Obstacle obstacle);
  void add_product(GradientStream* stream, std::int32_t i,
                   const at::Tensor& grad_output, const at::Tensor& input);
  // Throws lowtide::Error if a backward of compiled code would run without the
  // host's calls in later steps, or if i's gradient is not summed in place.
  void require_host(std::int32_t i) const;

  // [Note: Main gradients]
  // Parameter i's gradient as its matrix, in the reduce dtype, for layers that
  // add to it by themselves: one tensor for the unit's lifetime that has bytes
  // from when the unit's backward begins until that gradient is complete, zeros
  // at first.  (They read `main_grad` in forward already, and some write to it
  // before the weight's other uses are done.)  Undefined where a rank's rows do
  // not follow those of the rank before.  Such a layer tells
  // ModuleView::took_main_gradient.
  at::Tensor main_gradient(std::int32_t i);
  bool has_main_gradients() const { return !main_gradients_.empty(); }
  void open_main_gradients(GradientStream* stream);
  void close_main_gradients();
  // What of i's complete gradient is not in its slab yet.
  at::Tensor what_is_missing(std::int32_t i, at::Tensor gradient,
                             ModuleView* view);

 private:
  struct MainGradient {
    RepointedStorage bytes;
    at::Tensor tensor;
    bool open = false;
  };
  void close_main_gradient(std::size_t i);

  UnitName unit_;
  ParameterInfos infos_;
  const memory::FlatLayout& layout_;
  UnitGradients& gradients_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::vector<std::unique_ptr<MainGradient>> main_gradients_;  // null without
  std::vector<FusedUses> uses_;
  std::vector<ListedWeight> listed_;
  std::uint64_t capture_ = 0;  // in which the backward began
};

}  // namespace lowtide::shard
