// Gathers on paper: rank 0 of an axis on the ScriptedRuntime.  Every other rank
// passes what this one does, plus its rank in gathers.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/torch_version.h"
#include "gather/autograd_nodes.h"
#include "gather/saved_values.h"
#include "shard/skipping_runtime.h"
#include "testing/recording_collectives.h"
#include "testing/scripted_runtime.h"

namespace lowtide::gather {

inline constexpr std::int64_t kSize = 2;
inline constexpr std::int64_t kRows = 3;
inline constexpr std::int64_t kFeatures = 4;
inline constexpr std::int64_t kGatheredBytes = kSize * kRows * kFeatures * 4;

inline at::Tensor peer(const comm::RecordingCollectives::Request& request,
                       const at::Tensor& mine) {
  if (request.kind != comm::Kind::all_gather) return mine;
  return (mine.view(at::kFloat) + static_cast<float>(request.rank))
      .view(at::kByte);
}

struct Paper {
  explicit Paper(bool compare_bits = false)
      : axis(std::make_shared<Axis>(
            collectives, std::make_shared<memory::DeviceMemory>(waits, ledger),
            [this](const std::vector<std::string>& lines) {
              compared.push_back(lines);
            },
            compare_bits)),
        watch(scripted->watch_torch_allocations()) {}

  at::Tensor shard(float from) {
    return (at::arange(kRows * kFeatures, at::kFloat) * 0.25f + from)
        .view({kRows, kFeatures})
        .requires_grad_();
  }
  // What the ranks' shards are, one after the other.
  static at::Tensor whole(const at::Tensor& shard) {
    return at::cat({shard, shard + 1});
  }
  static at::Tensor weight(std::int64_t outputs, float from) {
    return (at::arange(outputs * kFeatures, at::kFloat) * 0.5f + from)
        .sin()
        .view({outputs, kFeatures})
        .requires_grad_();
  }

  std::vector<std::string> calls() const {
    std::vector<std::string> names;
    for (const auto& call : collectives->calls()) {
      names.push_back(
          base::concat(comm::kind_name(call.kind), " ", call.label));
    }
    return names;
  }
  Figures figures(const std::string& name) const {
    return axis->figures()[name];
  }
  std::int64_t held() const { return ledger->total_live(); }

  std::shared_ptr<device::ScriptedRuntime> scripted =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<shard::SkippingRuntime> waits =
      std::make_shared<shard::SkippingRuntime>(scripted);
  std::shared_ptr<memory::Ledger> ledger = std::make_shared<memory::Ledger>();
  std::shared_ptr<comm::RecordingCollectives> collectives =
      std::make_shared<comm::RecordingCollectives>(0, kSize, scripted, &peer);
  std::vector<std::vector<std::string>> compared;
  std::shared_ptr<Axis> axis;
  std::unique_ptr<device::AllocationObserver> watch;
};

// y = x * x, saving x through `saved`, as an operator under our hooks does.
class SquareNode final : public torch::autograd::Node {
 public:
  explicit SquareNode(std::unique_ptr<SavedValue> saved)
      : saved_(std::move(saved)) {}
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    return {gradients[0] * 2 * saved_->unpack()};
  }
  void release_variables() override { saved_.reset(); }
  const SavedValue& saved() const { return *saved_; }

 private:
  std::unique_ptr<SavedValue> saved_;
};

inline at::Tensor square(const at::Tensor& x, SavedValues& saved) {
  auto node = base::make_node<SquareNode>(saved.pack(x));
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  at::Tensor y = x.detach() * x.detach();
  torch::autograd::set_history(y, node);
  return y;
}

// A gather whose consumers' saved values are claims on it.
inline at::Tensor rematerialised(Paper& paper, const at::Tensor& shard,
                                 const std::string& name, SavedValues& saved,
                                 std::int64_t prefetch_bytes = kPrefetchBytes) {
  Gathered gathered =
      all_gather(paper.axis, shard, {name, true, prefetch_bytes});
  saved.add(gathered.tensor, gathered.site);
  return gathered.tensor;
}

}  // namespace lowtide::gather
