// One `fully_shard` call: parameters that are gathered, used, freed and whose
// gradients are reduced together.
//
// The unit ties its parts together and reacts to what happens around it: the
// module's forward (called from the bindings) and the autograd graph (through
// BackwardReceiver).  The parts: ParameterBuffers (bytes of the parameters),
// UnitGradients (where its gradients stand), UnitStateMachine.  What units
// share is in Root.
//
// Threads: one at a time.  No method needs the GIL or may be called with it
// held while a collective is issued or waited for; the ModuleView takes it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "comm/host_channel.h"
#include "memory/device_memory.h"
#include "shard/autograd_nodes.h"
#include "shard/group_forward.h"
#include "shard/held_graphs.h"
#include "shard/observed_gradient.h"
#include "shard/parameter_buffers.h"
#include "shard/seen_shards.h"
#include "shard/step_log.h"
#include "shard/storage.h"
#include "shard/unit_gradients.h"
#include "shard/unit_state.h"
#include "shard/weight_owners.h"
#include "shard/written_gradients.h"

namespace lowtide::shard {

class Root;
class RowStream;

// The unit's face on the module: which parameters `module._parameters` shows,
// and how local gradients become `.grad`.  Implementations take the GIL.
class ModuleView {
 public:
  virtual ~ModuleView() = default;
  virtual void show_full() = 0;
  virtual void show_shards() = 0;
  // From now on parameter i's full one, which is not shown now.
  virtual void replace_full(std::int32_t /*parameter*/,
                            const at::Tensor& /*full*/) {}
  // DTensors over `locals`, the local gradients of `parameters`.
  virtual std::vector<at::Tensor> wrap_gradients(
      const std::vector<std::int32_t>& parameters,
      const std::vector<at::Tensor>& locals) = 0;
  // Whether a layer has added parameter i's gradient to main_gradient since the
  // last call; `gradient`, what it gave autograd, then stands for none unless
  // `zero_out` asked for zeros in its place.
  struct MainGradientUse {
    bool added = false;
    bool zero_out = false;
  };
  virtual MainGradientUse took_main_gradient(std::int32_t /*parameter*/) {
    return {};
  }
  // See ObservedGradient.
  virtual ObservedGradient::Clears clears_gradients() const { return nullptr; }
  // This rank's part of a gradient that is a DTensor, and any other subclass
  // as a plain tensor.
  virtual at::Tensor local_gradient(std::int32_t parameter,
                                    const at::Tensor& gradient) = 0;
};

struct UnitGroups {
  std::shared_ptr<comm::Collectives> gather;
  std::shared_ptr<comm::Collectives> reduce;
  // Over all ranks of the mesh; null: they are not compared.
  std::shared_ptr<comm::HostChannel> host = nullptr;
};

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
};

class Unit final : public BackwardReceiver,
                   public std::enable_shared_from_this<Unit> {
 public:
  Unit(std::string name, std::vector<ParameterInfo> infos, UnitGroups groups,
       std::shared_ptr<memory::DeviceMemory> memory);
  ~Unit() override;

  // --- construction -------------------------------------------------------
  ParameterBuffers& buffers() { return buffers_; }
  const ParameterBuffers& buffers() const { return buffers_; }
  // The sharded parameters (whose `.grad` is set) and the full ones (leaves on
  // buffers().full(i)'s storage that autograd sees), in the order of `infos`;
  // `extension` for those that are `extended`, whose full ones it makes when
  // they have first been gathered.  `locals`: tensors on the shards' bytes that
  // are written to as well.
  void attach(std::vector<at::Tensor> shards, std::vector<at::Tensor> full,
              std::unique_ptr<ModuleView> view,
              std::unique_ptr<AllGatherExtension> extension = nullptr,
              const std::vector<at::Tensor>& locals = {});
  // Drops every reference to them, until attach is called again; the unit must
  // be sharded.
  void detach();
  bool attached() const { return view_ != nullptr; }
  void join(std::shared_ptr<Root> root, std::int32_t number);

  const std::string& name() const { return *name_; }
  // Both known only when the root is.
  void rename(std::string name, const std::vector<std::string>& parameters);
  std::int32_t number() const { return number_; }
  const std::shared_ptr<Root>& root() const { return root_; }
  UnitState state() const { return state_.state(); }
  UnitGradients& gradients() { return gradients_; }
  const UnitGradients& gradients() const { return gradients_; }
  const UnitGroups& groups() const { return groups_; }
  const std::vector<ParameterInfo>& infos() const { return infos_; }
  const std::shared_ptr<memory::DeviceMemory>& memory() const {
    return memory_;
  }

  // Bytes of the two buffers a gather needs: of the whole unit, or of the two
  // blocks of rows that live at once.
  std::int64_t planned_gathered_bytes() const;
  std::int64_t planned_input_bytes() const;

  // --- settings, between steps ----------------------------------------------
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  // If set, what `reshard_after_forward` leaves is not this rank's shard but
  // its part of the parameters over this smaller group, from which backward
  // gathers; see [Note: Kept parts].
  std::shared_ptr<comm::Collectives> post_forward_group;
  bool gradient_sync = true;
  // Other units run inside this one's forward: its gradients leave last.
  bool encloses_units = false;
  // A single torch.nn leaf module: nothing inside it can recompute, so when
  // autograd saved none of its parameters backward does not gather them.
  bool leaf_module = false;
  // False: the user knows that backward does not read the parameters.
  bool unshard_in_backward = true;
  // Replace the recorded order when not empty.
  std::vector<std::weak_ptr<Unit>> forward_prefetch;
  std::vector<std::weak_ptr<Unit>> backward_prefetch;

  // Other collectives over the same ranks.
  void use_groups(UnitGroups groups);

  // --- parameters -----------------------------------------------------------
  // Issues the all-gather unless one is under way or the parameters are there.
  // Outside of backward what was gathered before the shards changed is not.
  void gather();
  void wait_for_gather();  // compute may read the parameters afterwards
  void unshard();          // gather, wait, show
  void reshard_after_forward_now();
  void reshard();  // free and show the shards; waits for a gather first
  bool prefetched_in_vain() const { return prefetched_; }

  // --- forward --------------------------------------------------------------
  // The unit is several modules, sharded together.  Before the first forward.
  void group_modules(std::size_t count) { group_ = GroupForward(count); }

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
  // Called by Root when its forward returns: modules that did not run will not.
  void end_group_forward();

  // --- rows, for RowStream --------------------------------------------------
  // The unit's only parameter is read in blocks of rows, and nobody gathers it
  // ahead as a whole.  Before a forward; the same on every rank.
  RowStream& stream_rows();
  bool streams_rows() const { return streams_rows_; }
  // The unit's only parameter is gathered as ever, but its gradient comes in
  // blocks of rows.  Before a forward; the same on every rank.
  RowStream& gradient_rows();
  // The unit's module is an embedding whose forward reads the rows by itself,
  // `rows_at_once` of every rank's shard at a time (RowStream::begin_lookup):
  // nobody gathers the table as long as `reshard_after_forward` holds.  Its
  // gradient comes in blocks of rows.  Before a forward; the same on every
  // rank.
  RowStream& look_up_rows(std::int64_t rows_at_once);
  // Whether the forward that is running, or would run now, reads rows.
  bool looks_up_rows() const;
  // A forward over the rows begins; if it is recorded, its backward will
  // deliver their gradient block by block.
  void begin_rows_forward(bool recorded);
  void begin_rows_backward();
  // What runs before this unit in forward is gathered for its backward, now or
  // when the point has come (policy.h).
  void prefetch_for_backward();
  // What runs after it is gathered, if that has been put off until now.
  void prefetch_for_forward();
  void on_row_gradient(std::int64_t block, at::Tensor rows);

  // --- gradients in place, see docs/design/fused_gradients.md ---------------
  // Which parameters' gradients are summed where they are sent from.  Between
  // steps, with no gradients accumulated; the same on every rank.
  void fuse_gradients(const std::vector<bool>& fused);
  // What became of each so far.
  const std::vector<FusedUses>& fused_uses() const { return fused_uses_; }
  // Parameter i's gradient as its matrix, in the reduce dtype, for layers that
  // add to it by themselves (Megatron's and TransformerEngine's `main_grad`):
  // one tensor for the unit's lifetime that has bytes from when the unit's
  // backward begins until that gradient is complete, zeros at first.
  // Undefined where a rank's rows do not follow those of the rank before.  Such
  // a layer tells ModuleView::took_main_gradient.
  at::Tensor main_gradient(std::int32_t i);

  // --- backward -------------------------------------------------------------
  void on_output_gradient() override;
  void on_parameter_gradient(std::int32_t i, at::Tensor gradient) override;
  void on_inputs_done(const torch::autograd::Node* node) override;
  void on_gradient_returned(std::int32_t i) override;
  void on_recorded_backward(WeakNodePtr result) override;
  bool on_product(std::int32_t i, const at::Tensor& grad_output,
                  const at::Tensor& input, Obstacle obstacle) override;
  void on_only_product(std::int32_t i, const at::Tensor& grad_output,
                       const at::Tensor& input) override;
  void begin_backward();  // called by Root for every unit that takes part
  // Takes the gradients that others wrote to full parameters; see
  // written_gradients.h.
  void take_written_gradients();
  // Throws lowtide::Error if a split backward left gradients out for good.
  void require_split_backward_complete();
  // Called by Root when all gradients have landed; `more_backwards`: forwards
  // from before this backward still wait for theirs.
  // `graph_kept`: another backward may go through its graph.
  void end_backward(bool more_backwards, bool graph_kept);
  void abort(bool drop_gradients);
  // What waits for a reduction of a parameter: another took its place.
  void drop_waiting_gradient(std::int32_t i);

  // A forward begins on the current stream; see [Note: The stream of a
  // gradient].
  void follow_current_stream();
  // Plans the way out for the trainable parameters; see UnitGradients::plan.
  void plan_gradients(std::int64_t budget_bytes);
  // For what is trainable by now; see UnitGradients::extend_plan.
  void extend_plan(std::int64_t budget_bytes);
  // Whether the plan has no place for a gradient that may come.
  bool plan_lacks_any() const;
  // In which order gradients are expected: a permutation of all parameters, the
  // same on every rank; takes effect with the next plan.
  void expect_gradients(std::vector<std::int32_t> order);

  // What ranks may differ in and the order of calls depends on: of this rank,
  // to be compared, and what it is for all of them.  The negative number of
  // rows of the last forward's output, whether autograd saved a parameter,
  // what graphs it holds, whether a hook waits for a gradient, and, there and
  // back, which parameters graphs use.
  StepLog::Numbers numbers_to_compare();
  void agree_on(const StepLog::Numbers& greatest);
  // Where ranks can not be compared: by what the program has done so far.
  void agree_alone();
  // Its backward runs in the reverse order of its forward: none of it goes
  // through what recorded backwards gave.
  bool runs_in_order() const { return !graphs_.recorded(); }
  // [Note: Calls of the program inside a backward]
  // A chunk leaves between two nodes of its unit's backward, where the program
  // may have collectives of its own, a batch norm over all ranks.  Where ranks
  // use different parameters it would leave elsewhere among those: such a
  // backward sends nothing before it is over.
  bool used_alike() const { return used_alike_; }
  bool in_kept_graph() const { return graphs_.kept(); }
  // Of those settings that decide which collectives are issued, and of which
  // parameters want a gradient as the module shows them now.  The same in
  // words: the settings that were changed, the parameters that want none.
  std::uint64_t settings_hash() const;
  std::uint64_t frozen_hash() const;
  std::string settings_text() const;
  std::string frozen_text() const;

  // Parameters whose gradient may come, as `requires_grad` says now: see
  // [Note: Frozen and shown].
  std::vector<bool> trainable() const;

 private:
  void install_nodes();
  void install_node(std::size_t i);
  void make_extended();
  void list_fused();
  void follow_shards();
  bool may_want_gradient(std::size_t i) const;
  bool is_frozen(std::size_t i) const;
  std::uint64_t used_hash() const;
  bool wants_gradient(std::int32_t i) const;
  at::Tensor rank_major(std::int32_t i, at::Tensor gradient) const;
  at::Tensor with_written(std::int32_t i, at::Tensor gradient);
  void deliver(std::int32_t i, at::Tensor gradient);
  void show_full();
  void count_references();
  bool autograd_saved_parameters() const;
  void finish_backward();
  void publish_gradients();
  bool has_gradient_hooks() const;
  void end_forward();
  void watch_gradients();
  void observe_gradients();
  void drop_cleared_gradients();
  bool needs_gather_in_backward() const;
  void prefetch(Unit& other);
  void prefetch_after(Unit* next);
  std::size_t gradients_before(const Unit& next) const;
  void gather_next();

  std::vector<at::Tensor> wrap_gradients(
      const std::vector<std::int32_t>& parameters,
      const std::vector<at::Tensor>& locals);

  std::shared_ptr<std::string> name_;
  UnitGroups groups_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  ParameterBuffers buffers_;
  UnitGradients gradients_;
  UnitStateMachine state_;
  GroupForward group_;
  std::vector<ParameterInfo> infos_;
  std::unique_ptr<ModuleView> view_;
  std::shared_ptr<Root> root_;
  std::int32_t number_ = -1;

  // By parameter; null without.
  struct MainGradient {
    RepointedStorage bytes;
    at::Tensor tensor;
    bool open = false;
  };
  void open_main_gradients();
  void close_main_gradient(std::int32_t i);
  at::Tensor what_main_gradient_lacks(std::int32_t i, at::Tensor gradient);
  void require_host(std::int32_t i) const;
  void add_product(std::int32_t i, const at::Tensor& grad_output,
                   const at::Tensor& input);

  std::vector<std::unique_ptr<MainGradient>> main_gradients_;
  std::vector<FusedUses> fused_uses_;
  std::vector<ListedWeight> listed_;  // fused ones
  std::vector<at::Tensor> shards_;
  std::vector<at::Tensor> full_;
  std::vector<std::int32_t> gradient_order_;
  std::vector<NodePtr> nodes_;  // the tensors hold them weakly
  WrittenGradients written_;
  std::vector<ObservedGradient> observed_;
  bool observes_ = false;
  SeenShards seen_shards_;

  std::unique_ptr<comm::Pending> pending_gather_;
  std::unique_ptr<RowStream> rows_;
  bool streams_rows_ = false;
  bool gathers_parts_ = false;
  std::int64_t lookup_rows_ = 0;     // of every rank at once; 0: gathered whole
  Unit* next_in_forward_ = nullptr;  // to be gathered behind the last rows
  bool shown_ = false;
  bool prefetched_ = false;

  // References to the full parameters before the module's forward ran, and
  // whether any forward so far added to them.
  std::vector<std::pair<std::int64_t, std::int64_t>> references_;
  bool ever_saved_ = false;
  std::int64_t input_bytes_ = 0;  // of the forward that runs
  std::int64_t output_rows_ = 0;  // of the last forward
  // What all ranks know of it: the fewest rows of any, whether any saved.
  std::int64_t rows_of_all_ = 0;
  bool saved_by_any_ = false;

  // Forward calls whose inputs' gradients have not been seen, and calls that
  // ran without grad inside a recorded forward (re-entrant checkpoints).
  std::vector<WeakNodePtr> open_calls_;
  // Those whose have been seen, in this backward and in earlier ones: of a
  // graph that is retained they come again.
  std::vector<WeakNodePtr> done_now_;
  std::vector<WeakNodePtr> done_before_;
  std::int64_t calls_without_grad_ = 0;
  std::int64_t nested_calls_done_ = 0;
  // Recorded forwards none of whose inputs required grad: nothing tells when
  // their backward is over, so the unit is sealed at the end.
  std::int64_t calls_without_inputs_ = 0;
  bool recorded_ = false;  // a module of the forward that runs
  // A backward through what a recorded one gave visits the unit's nodes in no
  // order, so the unit is sealed at the end.
  HeldGraphs graphs_;
  bool listened_by_any_ = false;  // has_gradient_hooks() on some rank
  bool used_alike_ = true;        // on all ranks
  // To be gathered in this unit's backward, ahead of what waits for more than
  // so many of its gradients; how many have come.
  Unit* next_in_backward_ = nullptr;
  std::size_t gradients_before_next_ = 0;
  std::size_t gradients_come_ = 0;
  bool in_backward_ = false;      // takes part in the current backward
  std::uint64_t capture_ = 0;     // in which it began
  bool output_gradient_ = false;  // between output gradient and inputs done
};

}  // namespace lowtide::shard
