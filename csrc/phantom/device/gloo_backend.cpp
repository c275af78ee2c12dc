#include "phantom/device/gloo_backend.h"

#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "phantom/device/storage.h"

namespace lowtide::phantom {
namespace {

using Tensors = GlooBackend::Tensors;
using TensorLists = GlooBackend::TensorLists;

Tensors host(const Tensors& tensors) {
  Tensors views;
  for (const at::Tensor& tensor : tensors) views.push_back(host_view(tensor));
  return views;
}

TensorLists host(const TensorLists& lists) {
  TensorLists views;
  for (const Tensors& tensors : lists) views.push_back(host(tensors));
  return views;
}

Tensors flattened(const TensorLists& lists) {
  Tensors flat;
  for (const Tensors& list : lists) {
    flat.insert(flat.end(), list.begin(), list.end());
  }
  return flat;
}

// gloo's work, with the caller's tensors as its result.
class PhantomWork final : public c10d::Work {
 public:
  PhantomWork(c10::intrusive_ptr<c10d::Work> gloo, Tensors results)
      : gloo_(std::move(gloo)), results_(std::move(results)) {}

  bool isCompleted() override { return gloo_->isCompleted(); }
  bool isSuccess() const override { return gloo_->isSuccess(); }
  std::exception_ptr exception() const override { return gloo_->exception(); }
  int sourceRank() const override { return gloo_->sourceRank(); }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { gloo_->wait(); }
  bool wait(std::chrono::milliseconds timeout) override {
    return gloo_->wait(timeout);
  }
  void abort() override { gloo_->abort(); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return gloo_->getFuture()->then(
        [results = results_](c10::ivalue::Future& gloo) -> at::IValue {
          gloo.value();  // rethrows
          return results;
        },
        c10::ListType::create(c10::TensorType::get()));
  }

 private:
  c10::intrusive_ptr<c10d::Work> gloo_;
  Tensors results_;
};

GlooBackend::Work on_phantom(GlooBackend::Work gloo, Tensors results) {
  return c10::make_intrusive<PhantomWork>(std::move(gloo), std::move(results));
}

}  // namespace

GlooBackend::GlooBackend(c10::intrusive_ptr<c10d::Backend> gloo)
    : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

const std::string GlooBackend::getBackendName() const { return "phantom_gloo"; }

GlooBackend::Work GlooBackend::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  Tensors views = host(tensors);
  return on_phantom(gloo_->broadcast(views, options), tensors);
}

GlooBackend::Work GlooBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  Tensors views = host(tensors);
  return on_phantom(gloo_->allreduce(views, options), tensors);
}

GlooBackend::Work GlooBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  Tensors views = host(tensors);
  return on_phantom(gloo_->allreduce_coalesced(views, options), tensors);
}

GlooBackend::Work GlooBackend::reduce(Tensors& tensors,
                                      const c10d::ReduceOptions& options) {
  Tensors views = host(tensors);
  return on_phantom(gloo_->reduce(views, options), tensors);
}

GlooBackend::Work GlooBackend::allgather(
    TensorLists& outs, Tensors& ins, const c10d::AllgatherOptions& options) {
  TensorLists out_views = host(outs);
  Tensors in_views = host(ins);
  return on_phantom(gloo_->allgather(out_views, in_views, options),
                    flattened(outs));
}

GlooBackend::Work GlooBackend::_allgather_base(
    at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) {
  at::Tensor out_view = host_view(out), in_view = host_view(in);
  return on_phantom(gloo_->_allgather_base(out_view, in_view, options), {out});
}

GlooBackend::Work GlooBackend::allgather_coalesced(
    TensorLists& outs, Tensors& ins, const c10d::AllgatherOptions& options) {
  TensorLists out_views = host(outs);
  Tensors in_views = host(ins);
  return on_phantom(gloo_->allgather_coalesced(out_views, in_views, options),
                    flattened(outs));
}

GlooBackend::Work GlooBackend::allgather_into_tensor_coalesced(
    Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) {
  Tensors out_views = host(outs), in_views = host(ins);
  return on_phantom(
      gloo_->allgather_into_tensor_coalesced(out_views, in_views, options),
      outs);
}

GlooBackend::Work GlooBackend::reduce_scatter(
    Tensors& outs, TensorLists& ins,
    const c10d::ReduceScatterOptions& options) {
  Tensors out_views = host(outs);
  TensorLists in_views = host(ins);
  return on_phantom(gloo_->reduce_scatter(out_views, in_views, options), outs);
}

GlooBackend::Work GlooBackend::_reduce_scatter_base(
    at::Tensor& out, at::Tensor& in,
    const c10d::ReduceScatterOptions& options) {
  at::Tensor out_view = host_view(out), in_view = host_view(in);
  return on_phantom(gloo_->_reduce_scatter_base(out_view, in_view, options),
                    {out});
}

GlooBackend::Work GlooBackend::reduce_scatter_tensor_coalesced(
    Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) {
  Tensors out_views = host(outs), in_views = host(ins);
  return on_phantom(
      gloo_->reduce_scatter_tensor_coalesced(out_views, in_views, options),
      outs);
}

GlooBackend::Work GlooBackend::gather(TensorLists& outs, Tensors& ins,
                                      const c10d::GatherOptions& options) {
  TensorLists out_views = host(outs);
  Tensors in_views = host(ins);
  return on_phantom(gloo_->gather(out_views, in_views, options),
                    flattened(outs));
}

GlooBackend::Work GlooBackend::scatter(Tensors& outs, TensorLists& ins,
                                       const c10d::ScatterOptions& options) {
  Tensors out_views = host(outs);
  TensorLists in_views = host(ins);
  return on_phantom(gloo_->scatter(out_views, in_views, options), outs);
}

GlooBackend::Work GlooBackend::alltoall_base(
    at::Tensor& out, at::Tensor& in, std::vector<std::int64_t>& out_sizes,
    std::vector<std::int64_t>& in_sizes, const c10d::AllToAllOptions& options) {
  at::Tensor out_view = host_view(out), in_view = host_view(in);
  return on_phantom(
      gloo_->alltoall_base(out_view, in_view, out_sizes, in_sizes, options),
      {out});
}

GlooBackend::Work GlooBackend::send(Tensors& tensors, int rank, int tag) {
  Tensors views = host(tensors);
  return on_phantom(gloo_->send(views, rank, tag), tensors);
}

GlooBackend::Work GlooBackend::recv(Tensors& tensors, int rank, int tag) {
  Tensors views = host(tensors);
  return on_phantom(gloo_->recv(views, rank, tag), tensors);
}

GlooBackend::Work GlooBackend::recvAnysource(Tensors& tensors, int tag) {
  Tensors views = host(tensors);
  return on_phantom(gloo_->recvAnysource(views, tag), tensors);
}

GlooBackend::Work GlooBackend::barrier(const c10d::BarrierOptions& options) {
  return on_phantom(gloo_->barrier(options), {});
}

}  // namespace lowtide::phantom
