// One `fully_shard` call: parameters that are gathered, used, freed and whose
// gradients are reduced together.
//
// The unit ties its parts together and reacts to what happens around it: its
// modules' forward (called from the bindings), the autograd graph (through
// BackwardReceiver), its rows (RowReceiver), a unit that gathers it ahead
// (UnitAhead) and its root, which knows what units share.  The parts:
//
//   UnitSettings      what the user chose
//   UnitParameters    what comes: shards, gathered bytes, and what modules show
//   RowStream         a large parameter, or its gradient, in blocks of rows
//   Prefetch          which units are gathered ahead, and when
//   ForwardCalls      which calls still wait for their backward
//   ArrivingGradients, FusedGradients
//                     where gradients come from: autograd, products of layers
//   UnitGradients     what leaves: where gradients stand on their way out
//
// Threads: one at a time.  No method needs the GIL or may be called with it
// held while a collective is issued or waited for; the ModuleView takes it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "comm/host_channel.h"
#include "memory/device_memory.h"
#include "shard/arriving_gradients.h"
#include "shard/common_numbers.h"
#include "shard/fused_gradients.h"
#include "shard/gradients/unit_gradients.h"
#include "shard/graph/autograd_nodes.h"
#include "shard/graph/forward_calls.h"
#include "shard/group_forward.h"
#include "shard/parameters/module_view.h"
#include "shard/parameters/unit_parameters.h"
#include "shard/prefetch.h"
#include "shard/row_stream.h"
#include "shard/step_log.h"
#include "shard/unit_settings.h"

namespace lowtide::shard {

class Root;

struct UnitGroups {
  std::shared_ptr<comm::Collectives> gather;
  std::shared_ptr<comm::Collectives> reduce;
  // Over all ranks of the mesh; null: they are not compared.
  std::shared_ptr<comm::HostChannel> host = nullptr;
};

class Unit final : public BackwardReceiver,
                   public RowReceiver,
                   public UnitAhead,
                   public std::enable_shared_from_this<Unit> {
 public:
  // `settings`: shared with whoever changes them, between steps; `modules`: how
  // many are sharded together.
  Unit(
      std::string name, std::vector<ParameterInfo> infos, UnitGroups groups,
      std::shared_ptr<memory::DeviceMemory> memory,
      std::shared_ptr<UnitSettings> settings = std::make_shared<UnitSettings>(),
      std::size_t modules = 1);
  ~Unit() override;

  // --- before the first forward ---------------------------------------------
  // See ParameterLeaves::attach; `extension` for those that are `extended`,
  // whose full parameters it makes when they have first been gathered;
  // `locals`: tensors on the shards' bytes that are written to as well.
  void attach(std::vector<at::Tensor> shards, std::vector<at::Tensor> full,
              std::unique_ptr<ModuleView> view,
              std::unique_ptr<AllGatherExtension> extension = nullptr,
              const std::vector<at::Tensor>& locals = {});
  // Drops every reference to them, until attach is called again; the unit must
  // be sharded.
  void detach();
  // Known only when the root is.
  void rename(std::string name, const std::vector<std::string>& parameters);
  // What waits for a reduction of a parameter is dropped: another took its
  // place.
  void drop_waiting_gradient(std::int32_t i) { arriving_.drop(i); }
  // What waits for a reduction of a parameter comes back from a checkpoint:
  // between steps, the same parameters on every rank.
  void bring_back_gradient(std::int32_t i,
                           const UnitGradients::Waiting& waiting) {
    gradients_.bring_back(i, waiting);
    arriving_.observe();
  }
  // Other collectives over the same ranks.
  void use_groups(UnitGroups groups);
  // Which parameters' gradients are summed where they are sent from.  Between
  // steps, with no gradients accumulated; the same on every rank.
  void fuse_gradients(const std::vector<bool>& fused);

  // --- what it is made of ---------------------------------------------------
  const std::string& name() const { return *name_; }
  std::int32_t number() const override { return number_; }
  // Around all others under its root.  Whoever computes the loss may read its
  // parameters outside of its forward, so it keeps them, and its gradients,
  // until the backward is over.
  bool outermost() const { return outermost_; }
  const std::shared_ptr<Root>& root() const { return root_; }  // null before
  const UnitGroups& groups() const { return groups_; }
  UnitSettings& settings() { return *settings_; }
  const UnitSettings& settings() const { return *settings_; }
  UnitParameters& parameters() { return parameters_; }
  const UnitParameters& parameters() const { return parameters_; }
  UnitGradients& gradients() { return gradients_; }
  const UnitGradients& gradients() const { return gradients_; }
  FusedGradients& fused() { return fused_; }
  RowStream& rows() { return rows_; }
  const RowStream& rows() const { return rows_; }

  // --- parameters -----------------------------------------------------------
  // Issues the all-gather unless one is under way or the parameters are there.
  // Outside of backward what was gathered before the shards changed is not.
  void gather();
  void unshard();  // gather, wait, show
  void reshard();  // free and show the shards; waits for a gather first
  // Of an offloaded unit: whoever has shards and gradients may read and write
  // them afterwards, see [Note: Copies and the host].
  void wait_for_host_copies() const;

  // --- forward --------------------------------------------------------------
  struct ForwardCall {
    bool begins = false;        // the unit's forward begins with this module
    bool watch_inputs = false;  // where any requires grad
  };
  ForwardCall pre_forward(std::size_t module = 0);
  // Returns what to pass on instead of `inputs` (all requiring grad).
  std::vector<at::Tensor> watch_forward_inputs(
      const std::vector<at::Tensor>& inputs);
  // Whether the unit's forward ends with this module.
  bool post_forward(const std::vector<at::Tensor>& outputs_requiring_grad,
                    std::size_t module = 0);

 private:
  friend class RankComparison;
  friend class Root;

  // --- BackwardReceiver, called by the graph --------------------------------
  void on_output_gradient(std::int64_t call) override;
  void on_parameter_gradient(std::int32_t i, at::Tensor gradient) override;
  void on_inputs_done(const torch::autograd::Node* node) override;
  void on_gradient_returned(std::int32_t i) override;
  void on_recorded_backward(WeakNodePtr result) override;
  bool on_product(std::int32_t i, const at::Tensor& grad_output,
                  const at::Tensor& input, Obstacle obstacle) override;
  void on_only_product(std::int32_t i, const at::Tensor& grad_output,
                       const at::Tensor& input) override;

  // --- RowReceiver ----------------------------------------------------------
  void on_rows_chosen() override { replan(); }
  void on_rows_begin(RowPass pass) override;
  void on_rows_gather(std::int64_t k) override;
  void on_last_rows(RowPass pass) override;
  void on_row_gradient(std::int64_t k, at::Tensor gradient) override;

  // --- UnitAhead ------------------------------------------------------------
  void gather_ahead() override;
  void gather_alone_ahead();
  bool is_gathered_in_backward() const override;
  std::int64_t elements_to_cover(std::int64_t tokens) const override;

  // --- called by Root -------------------------------------------------------
  void join(std::shared_ptr<Root> root, std::int32_t number, bool outermost);
  // Modules of the group that did not run will not: the root's forward returns.
  void end_group_forward();
  void begin_backward();  // for every unit that takes part
  // Takes the gradients that others wrote to full parameters; see
  // written_gradients.h.
  void take_written_gradients();
  void require_split_backward_complete() {
    arriving_.require_split_backward_complete();
  }
  // All gradients have landed.  See ForwardCalls::end_backward.
  void end_backward(bool more_backwards, bool graph_kept);
  void abort(bool drop_gradients);

  // [Note: Whose numbers decide] in rank_comparison.h
  OwnNumbers::Compared numbers_to_compare();
  void agree_on(const OwnNumbers::Compared& greatest);
  // See [Note: Who has gradients]; `at_end`: a backward is over but for what it
  // publishes.
  StepLog::Numbers who_has_gradients(bool at_end) const;
  void hear_who_has_gradients(std::span<const std::int64_t> greatest);
  // Where ranks are not compared, behind rank 0's first numbers.
  void agree_alone();
  // [Note: Order without a comparison]
  // A rank whose inputs want no gradient has no node that tells when the unit's
  // backward is over.  In the reverse order of the forward the next unit's
  // tells in its place; a graph that is gone through again has no such order,
  // and who does not compare seals its units when the backward ends.
  void runs_out_of_schedule() { scheduled_ = false; }
  // Its backward runs in the reverse order of its forward: none of it goes
  // through what recorded backwards gave.
  bool runs_in_order() const { return !calls_.graphs().recorded(); }
  bool in_kept_graph() const { return calls_.graphs().kept(); }
  bool used_alike() const { return common_.used_alike; }

  // --- parameters -----------------------------------------------------------
  ParameterBuffers& buffers() { return parameters_.buffers(); }
  const ParameterBuffers& buffers() const { return parameters_.buffers(); }
  ParameterLeaves& leaves() { return parameters_.leaves(); }
  void require_awake() const;
  void wait_for_gather();  // compute may read the parameters afterwards
  void end_forward(bool keep = false);  // it stays gathered

  // --- gradients ------------------------------------------------------------
  // Rows of the unit's output whose gradients come in its call's backward.
  std::int64_t tokens_of_gradients() const;
  bool wire_outlasts() const;
  std::int64_t ring_bytes_alone(std::int64_t budget_bytes) const;
  std::int64_t lingering_bytes() const;
  void linger_inside(std::int64_t bytes);  // of a unit inside this one
  Unit* enter_backward(std::int64_t call);
  void prefetch_in_backward();
  void replan();
  // Of this backward, which the unit takes part in; null: without sync.
  GradientStream* stream();
  void finish_backward();
  void publish_gradients();

  std::shared_ptr<std::string> name_;
  ParameterInfos infos_;
  UnitGroups groups_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  std::shared_ptr<UnitSettings> settings_;
  std::shared_ptr<Root> root_;
  std::int32_t number_ = -1;
  bool outermost_ = false;

  UnitParameters parameters_;
  Prefetch prefetch_;

  GroupForward group_;
  ForwardCalls calls_;
  std::int64_t forward_call_ = 0;  // number of the last one
  std::int64_t input_bytes_ = 0;   // of the forward that runs
  std::int64_t output_rows_ = 0;   // of the last forward
  std::int64_t lingers_inside_ = 0;

  UnitGradients gradients_;
  RowStream rows_;
  ArrivingGradients arriving_;
  FusedGradients fused_;
  bool in_backward_ = false;  // takes part in the current backward

  // The optimizer's steps when a recorded forward last began with this unit and
  // was not detached.
  std::int64_t attached_at_step_ = -1;

  CommonNumbers common_;
  bool compared_ = true;
  bool scheduled_ = true;          // all calls of this backward
  bool expects_own_ranks_ = true;  // what is gathered ahead is over them
};

}  // namespace lowtide::shard
