#include "shard/unit.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/graph_task.h"
#include "shard/policy.h"
#include "shard/root.h"

namespace lowtide::shard {

Unit::Unit(std::string name, std::vector<ParameterInfo> infos,
           UnitGroups groups, std::shared_ptr<memory::DeviceMemory> memory,
           std::shared_ptr<UnitSettings> settings, std::size_t modules)
    : name_(std::make_shared<std::string>(std::move(name))),
      infos_(std::move(infos)),
      groups_(std::move(groups)),
      memory_(std::move(memory)),
      settings_(std::move(settings)),
      parameters_(name_, infos_, *groups_.gather, memory_, settings_->host),
      group_(modules),
      gradients_(name_, infos_, buffers().layout(), groups_.reduce,
                 settings_->reduction, memory_, settings_->host),
      rows_(name_, *settings_, groups_.gather, parameters_, gradients_, memory_,
            *this),
      arriving_(infos_, leaves(), gradients_),
      fused_(name_, infos_, buffers().layout(), gradients_, memory_) {}

// After an exception gradients may be on their way, from bytes that go back to
// compute now.
Unit::~Unit() {
  try {
    if (root_) {
      root_->forget(*this);
    }
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: unit '" << *name_
               << "': giving its bytes back failed: " << error.what();
  }
}

// --- before the first forward -----------------------------------------------

void Unit::attach(std::vector<at::Tensor> shards, std::vector<at::Tensor> full,
                  std::unique_ptr<ModuleView> view,
                  std::unique_ptr<AllGatherExtension> extension,
                  const std::vector<at::Tensor>& locals) {
  buffers().use(std::move(extension));
  if (leaves().attach(std::move(shards), std::move(full), std::move(view),
                      weak_from_this())) {
    arriving_.watch_leaves();
    fused_.list(leaves());
  } else {
    arriving_.watch_shards();
  }
  std::vector<ShardedGradients::Parameter> parameters;
  for (std::size_t i = 0; i < leaves().size(); ++i) {
    const auto& slice = buffers().slice(i);
    const auto rank = groups_.gather->rank();
    parameters.push_back(
        {leaves().shards()[i],
         infos_[i].local_sizes(groups_.gather->size(), slice.local_rows(rank)),
         slice.local_numel(rank), slice.shard_numel, slice.shard_offset,
         infos_[i].dtype_of_grad()});
  }
  gradients_.sharded().set_parameters(std::move(parameters));
  parameters_.watch_shards(leaves().shards(), locals);
  if (!gradients_.accumulating()) {
    gradients_.plan(leaves().trainable(),
                    ring_bytes_alone(root_ ? root_->gradient_budget()
                                           : kDefaultRingBudget));
  }
}

void Unit::detach() {
  arriving_.unwatch_shards();
  parameters_.watch_shards({}, {});
  leaves().detach();
  gradients_.sharded().set_parameters({});
}

void Unit::rename(std::string name,
                  const std::vector<std::string>& parameters) {
  *name_ = std::move(name);
  infos_.rename(parameters);
  buffers().names_changed();
}

void Unit::join(std::shared_ptr<Root> root, std::int32_t number,
                bool outermost) {
  root_ = std::move(root);
  number_ = number;
  outermost_ = outermost;
  gradients_.set_number(number);
}

void Unit::use_groups(UnitGroups groups) {
  gradients_.use_group(groups.reduce);
  groups.host = groups_.host;
  groups_ = std::move(groups);
}

void Unit::fuse_gradients(const std::vector<bool>& fused) {
  if (fused_.choose(fused)) {
    fused_.list(leaves());
    if (leaves().size() > 0) replan();  // otherwise attach plans
  }
}

void Unit::replan() {
  if (root_) {
    root_->replan(*this);
  } else {
    gradients_.plan(leaves().trainable(), ring_bytes_alone(kDefaultRingBudget));
  }
}

// Until the root plans for all of its units.
std::int64_t Unit::ring_bytes_alone(std::int64_t budget_bytes) const {
  const RingUnit alone{.ranks = groups_.reduce->size(),
                       .wire_bytes = gradients_.wire_bytes(),
                       .experts = gradients_.of_experts()};
  return ring_bytes(alone, budget_bytes);
}

// --- parameters -------------------------------------------------------------

void Unit::require_awake() const {
  if (buffers().asleep()) {
    throw Error(base::error_text(
        base::concat("unit '", *name_, "'"), "parameters that are awake",
        "a forward or a gather while they sleep",
        "Call lowtide.wake(model) on every rank first, with refill= if they "
        "were dropped."));
  }
}

void Unit::gather() {
  require_awake();
  const auto steps = root_ ? root_->optimizer_steps() : 0;
  const bool backward = base::in_backward();
  if (parameters_.here()) {
    if (backward || !parameters_.stale(steps)) {
      return;
    }
    reshard();
  }
  if (root_) {
    root_->log().note({StepNote::What::gather, number_});
  }
  parameters_.gather(*groups_.gather,
                     backward ? settings_->post_forward_group.get() : nullptr,
                     steps, /*timed=*/!backward);
}

void Unit::wait_for_gather() {
  if (parameters_.arrive()) {
    arriving_.watch_leaves();
    fused_.list(leaves());
  }
}

void Unit::unshard() {
  gather();
  wait_for_gather();
  leaves().show_full();
}

void Unit::reshard() {
  wait_for_gather();
  parameters_.reshard(settings_->keep_unsharded_storage);
}

void Unit::wait_for_host_copies() const {
  if (auto* const host = buffers().host()) host->wait();
}

void Unit::gather_ahead() {
  gather_alone_ahead();
  for (const auto& other : settings_->beside) {
    if (const auto unit = other.lock()) unit->gather_alone_ahead();
  }
}

void Unit::gather_alone_ahead() {
  if (rows_.streams() || parameters_.here()) {
    return;
  }
  gather();
  parameters_.set_ahead(true);
}

// [Note: Units beside each other]
// One `fully_shard` call whose parameters are on several meshes makes a unit
// for each.  They are entered one after the other and left in reverse, as if
// the first were around the others, and whoever gathers one ahead gathers them
// all.  Their backwards are one: gradients come in an order of their own.
// Without a comparison the ranks of one mesh have in common what those of
// another may not, and in the stream each stands behind the others; so nothing
// of them leaves before the next unit's backward begins, which all ranks see,
// and the sources of all may stay until that is over.

// --- what ranks have in common ----------------------------------------------

// [Note: Who has gradients]
// Where all ranks know that some leave parameters of the unit out, one number
// for each parameter travels with every comparison over the unit's ranks: at
// the end of a backward whether this rank has a gradient of it, which a first
// number says.  So what ranks send stays as long on all of them, also where
// their calls differ.
StepLog::Numbers Unit::who_has_gradients(bool at_end) const {
  if (!common_.left_out_by_any) return {};
  const bool tells = at_end && gradients_.hosts_tell();
  StepLog::Numbers numbers(1 + gradients_.size());
  numbers[0] = tells;
  for (const auto i : gradients_.trainable()) {
    numbers[1 + static_cast<std::size_t>(i)] = tells && gradients_.used_here(i);
  }
  return numbers;
}

void Unit::hear_who_has_gradients(std::span<const std::int64_t> greatest) {
  if (greatest.front() == 0) return;
  gradients_.told([&](std::int32_t i) {
    return greatest[1 + static_cast<std::size_t>(i)] != 0;
  });
}

OwnNumbers::Compared Unit::numbers_to_compare() {
  auto graphs = calls_.graphs().own();
  if (root_->keeps_graph()) graphs.kept = 1;
  return OwnNumbers{.output_rows = output_rows_,
                    .saved = leaves().ever_saved(),
                    .graphs = graphs,
                    .listened = leaves().have_gradient_hooks() ||
                                settings_->on_gradients != nullptr,
                    .used_hash = leaves().used_hash(),
                    .calls_without_inputs = calls_.has_calls_without_inputs(
                        root_->optimizer_steps()),
                    .attached = attached_at_step_ == root_->optimizer_steps(),
                    .gather_ns = parameters_.gather_ns(),
                    .left_out = gradients_.left_out()}
      .to_compare();
}

void Unit::agree_on(const OwnNumbers::Compared& greatest) {
  common_ = CommonNumbers::of(greatest);
  calls_.graphs().agree_on(common_.graphs_of_any);
  calls_.agree_on_calls_without_inputs(common_.calls_without_inputs_of_any);
}

// Rank 0's first numbers stay, but those that the inputs decide about, which
// may differ on one rank or later: where they want gradients autograd saves the
// parameters.
void Unit::agree_alone() {
  compared_ = false;
  common_.saved_by_any = !rows_.looks_up();
  common_.attached_on_any = true;
}

// --- recovery ---------------------------------------------------------------

void Unit::abort(bool drop_gradients) {
  parameters_.abort();
  rows_.abort();
  prefetch_ = {};
  in_backward_ = false;
  group_.end();
  input_bytes_ = 0;
  calls_.clear();
  arriving_.expect_as_reduced();
  fused_.close_main_gradients();
  if (drop_gradients) {
    gradients_.abort();
    arriving_.clear();
  }
}

}  // namespace lowtide::shard
