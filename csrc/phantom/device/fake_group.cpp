#include "phantom/device/fake_group.h"

#include <utility>

#include "phantom/device/device_clock.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using Tensors = FakeGroup::Tensors;
using TensorLists = FakeGroup::TensorLists;

double bytes_of(const at::Tensor& tensor) {
  return tensor.device().type() == kPhantom
             ? static_cast<double>(tensor.nbytes())
             : 0;
}

double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

double bytes_of(const TensorLists& lists) {
  double bytes = 0;
  for (const Tensors& tensors : lists) bytes += bytes_of(tensors);
  return bytes;
}

bool on_phantom(const Tensors& tensors) {
  return !tensors.empty() && tensors.front().device().type() == kPhantom;
}

class TimedWork final : public c10d::FakeWork {
 public:
  explicit TimedWork(Moment done) : done_(done) {}

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (auto timeline = device_clock().timeline()) {
      timeline->wait(current_stream(), done_);
    }
  }
  void blockCurrentStream() override { synchronize(); }

 private:
  Moment done_;
};

}  // namespace

FakeGroup::FakeGroup(int rank, int size, c10::intrusive_ptr<Options> options,
                     std::vector<std::int64_t> ranks)
    : FakeProcessGroup(rank, size, std::move(options)),
      number_(device_clock().number_of_group()),
      ranks_(std::move(ranks)) {}

FakeGroup::Work FakeGroup::timed(CollectiveKind kind, double bytes,
                                 bool async) {
  auto timeline = device_clock().timeline();
  if (!timeline || bytes == 0) return c10::make_intrusive<c10d::FakeWork>();
  if (coalesced_) {
    if (!coalesced_->kind) coalesced_->kind = kind;
    coalesced_->bytes += bytes;
    return c10::make_intrusive<c10d::FakeWork>();
  }
  const auto placement =
      place(ranks_, timeline->machine().network.ranks_per_node);
  timeline->issue();
  return c10::make_intrusive<TimedWork>(timeline->collective(
      number_, placement, current_stream(), async, kind, bytes));
}

FakeGroup::Work FakeGroup::broadcast(Tensors& tensors,
                                     const c10d::BroadcastOptions& options) {
  FakeProcessGroup::broadcast(tensors, options);
  return timed(CollectiveKind::broadcast, bytes_of(tensors), options.asyncOp);
}

FakeGroup::Work FakeGroup::allreduce(Tensors& tensors,
                                     const c10d::AllreduceOptions& options) {
  FakeProcessGroup::allreduce(tensors, options);
  return timed(CollectiveKind::all_reduce, bytes_of(tensors), options.asyncOp);
}

FakeGroup::Work FakeGroup::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  FakeProcessGroup::allreduce_coalesced(tensors, options);
  return timed(CollectiveKind::all_reduce, bytes_of(tensors), options.asyncOp);
}

FakeGroup::Work FakeGroup::reduce(Tensors& tensors,
                                  const c10d::ReduceOptions& options) {
  FakeProcessGroup::reduce(tensors, options);
  return timed(CollectiveKind::broadcast, bytes_of(tensors), options.asyncOp);
}

FakeGroup::Work FakeGroup::allgather(TensorLists& outs, Tensors& ins,
                                     const c10d::AllgatherOptions& options) {
  if (!on_phantom(ins)) return FakeProcessGroup::allgather(outs, ins, options);
  return timed(CollectiveKind::all_gather, bytes_of(outs), options.asyncOp);
}

FakeGroup::Work FakeGroup::_allgather_base(
    at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) {
  if (!on_phantom({in})) {
    return FakeProcessGroup::_allgather_base(out, in, options);
  }
  return timed(CollectiveKind::all_gather, bytes_of(out), options.asyncOp);
}

FakeGroup::Work FakeGroup::allgather_coalesced(
    TensorLists& outs, Tensors& ins, const c10d::AllgatherOptions& options) {
  FakeProcessGroup::allgather_coalesced(outs, ins, options);
  return timed(CollectiveKind::all_gather, bytes_of(outs), options.asyncOp);
}

FakeGroup::Work FakeGroup::allgather_into_tensor_coalesced(
    Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) {
  if (!on_phantom(ins)) {
    return FakeProcessGroup::allgather_into_tensor_coalesced(outs, ins,
                                                             options);
  }
  return timed(CollectiveKind::all_gather, bytes_of(outs), options.asyncOp);
}

FakeGroup::Work FakeGroup::gather(TensorLists& outs, Tensors& ins,
                                  const c10d::GatherOptions& options) {
  FakeProcessGroup::gather(outs, ins, options);
  const double bytes = bytes_of(ins) * static_cast<double>(getSize());
  return timed(CollectiveKind::broadcast, bytes, options.asyncOp);
}

FakeGroup::Work FakeGroup::scatter(Tensors& outs, TensorLists& ins,
                                   const c10d::ScatterOptions& options) {
  FakeProcessGroup::scatter(outs, ins, options);
  const double bytes = bytes_of(outs) * static_cast<double>(getSize());
  return timed(CollectiveKind::broadcast, bytes, options.asyncOp);
}

FakeGroup::Work FakeGroup::reduce_scatter(
    Tensors& outs, TensorLists& ins,
    const c10d::ReduceScatterOptions& options) {
  FakeProcessGroup::reduce_scatter(outs, ins, options);
  return timed(CollectiveKind::reduce_scatter, bytes_of(ins), options.asyncOp);
}

FakeGroup::Work FakeGroup::_reduce_scatter_base(
    at::Tensor& out, at::Tensor& in,
    const c10d::ReduceScatterOptions& options) {
  FakeProcessGroup::_reduce_scatter_base(out, in, options);
  return timed(CollectiveKind::reduce_scatter, bytes_of(in), options.asyncOp);
}

FakeGroup::Work FakeGroup::reduce_scatter_tensor_coalesced(
    Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) {
  FakeProcessGroup::reduce_scatter_tensor_coalesced(outs, ins, options);
  return timed(CollectiveKind::reduce_scatter, bytes_of(ins), options.asyncOp);
}

FakeGroup::Work FakeGroup::alltoall_base(at::Tensor& out, at::Tensor& in,
                                         std::vector<std::int64_t>& out_sizes,
                                         std::vector<std::int64_t>& in_sizes,
                                         const c10d::AllToAllOptions& options) {
  FakeProcessGroup::alltoall_base(out, in, out_sizes, in_sizes, options);
  return timed(CollectiveKind::all_to_all, bytes_of(in), options.asyncOp);
}

FakeGroup::Work FakeGroup::alltoall(Tensors& outs, Tensors& ins,
                                    const c10d::AllToAllOptions& options) {
  FakeProcessGroup::alltoall(outs, ins, options);
  return timed(CollectiveKind::all_to_all, bytes_of(ins), options.asyncOp);
}

FakeGroup::Work FakeGroup::send(Tensors& tensors, int rank, int tag) {
  FakeProcessGroup::send(tensors, rank, tag);
  return timed(CollectiveKind::send, bytes_of(tensors), /*async=*/true);
}

FakeGroup::Work FakeGroup::recv(Tensors& tensors, int rank, int tag) {
  FakeProcessGroup::recv(tensors, rank, tag);
  return timed(CollectiveKind::send, bytes_of(tensors), /*async=*/true);
}

void FakeGroup::startCoalescing() { coalesced_.emplace(); }

FakeGroup::Work FakeGroup::endCoalescing() {
  const Coalesced all =
      std::exchange(coalesced_, std::nullopt).value_or(Coalesced{});
  FakeProcessGroup::endCoalescing();
  if (!all.kind) return c10::make_intrusive<c10d::FakeWork>();
  return timed(*all.kind, all.bytes, /*async=*/true);
}

}  // namespace lowtide::phantom
