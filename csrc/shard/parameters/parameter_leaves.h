// A unit's parameters as its modules and autograd know them: the sharded ones,
// whose `.grad` is set, the full ones, which graphs lead to, and the nodes that
// take the full ones' gradients.  Their bytes are ParameterBuffers'.
//
// Threads: one at a time; a ModuleView takes the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shard/graph/autograd_nodes.h"
#include "shard/parameter_info.h"
#include "shard/parameters/module_view.h"
#include "shard/parameters/parameter_buffers.h"

namespace lowtide::shard {

class ParameterLeaves {
 public:
  explicit ParameterLeaves(ParameterInfos infos) : infos_(std::move(infos)) {}

  // The sharded parameters and the full ones, leaves on the buffers' storages,
  // in the order of the infos.  Autograd delivers the full ones' gradients to
  // `receiver` from now on.  Returns whether the full ones are others than
  // before.
  bool attach(std::vector<at::Tensor> shards, std::vector<at::Tensor> full,
              std::unique_ptr<ModuleView> view,
              std::weak_ptr<BackwardReceiver> receiver);
  // Drops the shards and the view; they must be what the modules show.
  void detach();
  bool attached() const { return view_ != nullptr; }
  // Another full parameter takes i's place, which is not shown now.
  void replace_full(std::size_t i, at::Tensor full);

  std::size_t size() const { return shards_.size(); }
  const std::vector<at::Tensor>& shards() const { return shards_; }
  const std::vector<at::Tensor>& full() const { return full_; }
  // The dtype to which autograd casts i's gradients from now on; none: as they
  // were computed.  Nothing where autograd knows no gradients of i's dtype.
  void set_gradient_dtype(std::int32_t i, std::optional<at::ScalarType> dtype);
  // By parameter; null where autograd knows no gradients of its dtype.
  const std::vector<NodePtr>& nodes() const { return nodes_; }
  const std::weak_ptr<BackwardReceiver>& receiver() const { return receiver_; }
  // Null while detached.
  ModuleView* view() const { return view_.get(); }

  // --- what the modules show ------------------------------------------------
  void show_full();
  void show_shards();
  // [Note: Frozen and shown]
  // `requires_grad` is changed at what the module shows.  As in FSDP2, a full
  // parameter takes it over from its shard whenever it begins to be shown; what
  // changes while it is shown counts until it is not.
  void follow_shards();
  bool is_frozen(std::size_t i) const;
  // Parameters whose gradient may come, as `requires_grad` says now.
  std::vector<bool> trainable() const;
  // A shard has a post-accumulate hook.
  bool have_gradient_hooks() const;
  // A number of which are frozen, to be compared over ranks, and their names.
  std::uint64_t frozen_hash() const;
  std::string frozen_text() const;

  // --- what graphs have of them ---------------------------------------------
  // A forward begins on the current stream; see [Note: The stream of a
  // gradient].
  void follow_current_stream();
  // The root's forward begins.
  void begin_uses();
  // A number of which parameters living graphs use, and which of them a forward
  // since `begin_uses` has: a graph of the step before lives as long as its
  // loss, on one rank and not on another, and hides who uses what now.
  std::uint64_t used_hash() const;
  // [Note: Saved parameters]
  // A leaf that autograd saves raises its TensorImpl's use count, a view of it
  // that autograd saves raises the StorageImpl's: comparing both before and
  // after the module's forward tells whether backward will read the parameters.
  //
  // A graph of an earlier forward may die meanwhile, when Python collects a
  // caught exception, on one rank and not on another: what it gives back would
  // hide what this forward saves, and a rank that does not gather leaves the
  // others waiting.  So saving once counts forever: such a graph saved as well.
  void count_references(const ParameterBuffers& buffers);
  void look_for_saved(const ParameterBuffers& buffers);
  bool ever_saved() const { return ever_saved_; }
  // Somebody may have saved one unseen.
  void assume_saved() { ever_saved_ = true; }

 private:
  void install_node(std::size_t i);
  bool any_saved(const ParameterBuffers& buffers) const;

  ParameterInfos infos_;
  std::unique_ptr<ModuleView> view_;
  std::weak_ptr<BackwardReceiver> receiver_;
  std::vector<at::Tensor> shards_;
  std::vector<at::Tensor> full_;
  std::vector<NodePtr> nodes_;             // the tensors hold them weakly
  bool shown_ = false;                     // the full ones
  std::vector<std::int64_t> uses_before_;  // of nodes, at begin_uses
  // Of the full tensors and their storages, before the module's forward ran.
  std::vector<std::pair<std::int64_t, std::int64_t>> references_;
  bool ever_saved_ = false;
};

}  // namespace lowtide::shard
