// Collectives of phantom tensors over gloo, for exact mode: gloo reads and
// writes the tensors' own bytes, so results are gloo's on CPU tensors bit for
// bit.  Takes CPU tensors too.
//
// The device runs work the moment it is issued, so a collective's inputs are
// ready; its outputs are once its Work was waited for, which blocks the host
// (on a GPU only the stream would wait).  Issuing never blocks.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

namespace lowtide::phantom {

class GlooBackend final : public c10d::Backend {
 public:
  explicit GlooBackend(c10::intrusive_ptr<c10d::Backend> gloo);

  const std::string getBackendName() const override;
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  std::uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }

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
  Work reduce_scatter(Tensors& outs, TensorLists& ins,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                            const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins,
      const c10d::ReduceScatterOptions& options) override;
  Work gather(TensorLists& outs, Tensors& ins,
              const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outs, TensorLists& ins,
               const c10d::ScatterOptions& options) override;
  Work alltoall_base(at::Tensor& out, at::Tensor& in,
                     std::vector<std::int64_t>& out_sizes,
                     std::vector<std::int64_t>& in_sizes,
                     const c10d::AllToAllOptions& options) override;
  Work send(Tensors& tensors, int rank, int tag) override;
  Work recv(Tensors& tensors, int rank, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace lowtide::phantom
