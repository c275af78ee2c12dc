// The process group of meta mode, as torch's `fake` one: collectives move
// nothing and are over at once.  They tell the device's clock how long NCCL's
// would take.
//
// All-gathers of CPU tensors copy the caller's piece into every place, as
// torch's do, for code that compares what ranks have.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "phantom/time/costs.h"

namespace lowtide::phantom {

class FakeGroup final : public c10d::Backend {
 public:
  // `ranks`: global ones of its members.
  FakeGroup(int rank, int size, std::vector<std::int64_t> ranks);

  const std::string getBackendName() const override { return "fake"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  Work broadcast(Tensors& tensors,
                 const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors,
                 const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather(TensorLists& outs, Tensors& ins,
                 const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& out, at::Tensor& in,
                       const c10d::AllgatherOptions& options) override;
  Work allgather_coalesced(TensorLists& outs, Tensors& ins,
                           const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(
      Tensors& outs, Tensors& ins,
      const c10d::AllgatherOptions& options) override;
  Work gather(TensorLists& outs, Tensors& ins,
              const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outs, TensorLists& ins,
               const c10d::ScatterOptions& options) override;
  Work reduce_scatter(Tensors& outs, TensorLists& ins,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                            const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins,
      const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& out, at::Tensor& in,
                     std::vector<std::int64_t>& out_sizes,
                     std::vector<std::int64_t>& in_sizes,
                     const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outs, Tensors& ins,
                const c10d::AllToAllOptions& options) override;
  Work send(Tensors& tensors, int rank, int tag) override;
  Work recv(Tensors& tensors, int rank, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;

  void startCoalescing() override;
  Work endCoalescing() override;

 private:
  struct Coalesced {
    std::optional<CollectiveKind> kind;  // of the first
    double bytes = 0;
  };

  // `bytes` of phantom tensors; none: nothing to tell.
  Work timed(CollectiveKind kind, double bytes, bool async);

  c10::intrusive_ptr<Options> options_ =
      c10::make_intrusive<Options>(std::string("fake"));
  std::int64_t number_;
  std::vector<std::int64_t> ranks_;
  std::optional<Coalesced> coalesced_;  // between start and end
};

}  // namespace lowtide::phantom
