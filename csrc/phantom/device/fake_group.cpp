#include "phantom/device/fake_group.h"

#include <utility>

#include "phantom/device/device_clock.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using Tensors = FakeGroup::Tensors;
using TensorLists = FakeGroup::TensorLists;

double phantom_bytes(const at::Tensor& tensor) {
  return is_phantom(tensor) ? static_cast<double>(tensor.nbytes()) : 0;
}

double phantom_bytes(const Tensors& tensors) {
  double bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += phantom_bytes(tensor);
  return bytes;
}

double phantom_bytes(const TensorLists& lists) {
  double bytes = 0;
  for (const Tensors& tensors : lists) bytes += phantom_bytes(tensors);
  return bytes;
}

bool on_phantom(const Tensors& tensors) {
  return !tensors.empty() && is_phantom(tensors.front());
}

// As ProcessGroupNCCL's: waiting holds up the current stream, not the host.
class FakeWork final : public c10d::Work {
 public:
  explicit FakeWork(std::optional<TimeStamp> done = std::nullopt)
      : done_(done) {}

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (!done_) return;
    if (auto timeline = device_clock().timeline()) {
      timeline.wait(current_stream(), *done_);
    }
  }
  void blockCurrentStream() override { synchronize(); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    future->markCompleted();
    return future;
  }

 private:
  std::optional<TimeStamp> done_;
};

void copy_to_all(const Tensors& places, const at::Tensor& piece) {
  for (const at::Tensor& place : places) place.copy_(piece);
}

}  // namespace

FakeGroup::FakeGroup(int rank, int size, std::vector<std::int64_t> ranks)
    : Backend(rank, size),
      number_(device_clock().number_of_group()),
      ranks_(std::move(ranks)) {}

FakeGroup::Work FakeGroup::timed(CollectiveKind kind, double bytes,
                                 bool async) {
  auto timeline = device_clock().timeline();
  if (!timeline || bytes == 0) return c10::make_intrusive<FakeWork>();
  if (coalesced_) {
    if (!coalesced_->kind) coalesced_->kind = kind;
    coalesced_->bytes += bytes;
    return c10::make_intrusive<FakeWork>();
  }
  const auto placement =
      place(ranks_, timeline->machine().network.ranks_per_node);
  timeline->issue();
  return c10::make_intrusive<FakeWork>(timeline.stamp(timeline->collective(
      number_, placement, current_stream(), async, kind, bytes)));
}

FakeGroup::Work FakeGroup::broadcast(Tensors& tensors,
                                     const c10d::BroadcastOptions& options) {
  return timed(CollectiveKind::broadcast, phantom_bytes(tensors),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::allreduce(Tensors& tensors,
                                     const c10d::AllreduceOptions& options) {
  return timed(CollectiveKind::all_reduce, phantom_bytes(tensors),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return timed(CollectiveKind::all_reduce, phantom_bytes(tensors),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::reduce(Tensors& tensors,
                                  const c10d::ReduceOptions& options) {
  return timed(CollectiveKind::broadcast, phantom_bytes(tensors),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::allgather(TensorLists& outs, Tensors& ins,
                                     const c10d::AllgatherOptions& options) {
  if (!on_phantom(ins)) copy_to_all(outs.at(0), ins.at(0));
  return timed(CollectiveKind::all_gather, phantom_bytes(outs),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::_allgather_base(
    at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) {
  if (!is_phantom(in)) copy_to_all(out.chunk(getSize()), in);
  return timed(CollectiveKind::all_gather, phantom_bytes(out), options.asyncOp);
}

FakeGroup::Work FakeGroup::allgather_coalesced(
    TensorLists& outs, Tensors&, const c10d::AllgatherOptions& options) {
  return timed(CollectiveKind::all_gather, phantom_bytes(outs),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::allgather_into_tensor_coalesced(
    Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) {
  for (std::size_t i = 0; i < outs.size() && !on_phantom(ins); ++i) {
    copy_to_all(outs[i].chunk(getSize()), ins[i]);
  }
  return timed(CollectiveKind::all_gather, phantom_bytes(outs),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::gather(TensorLists&, Tensors& ins,
                                  const c10d::GatherOptions& options) {
  const double bytes = phantom_bytes(ins) * static_cast<double>(getSize());
  return timed(CollectiveKind::broadcast, bytes, options.asyncOp);
}

FakeGroup::Work FakeGroup::scatter(Tensors& outs, TensorLists&,
                                   const c10d::ScatterOptions& options) {
  const double bytes = phantom_bytes(outs) * static_cast<double>(getSize());
  return timed(CollectiveKind::broadcast, bytes, options.asyncOp);
}

FakeGroup::Work FakeGroup::reduce_scatter(
    Tensors&, TensorLists& ins, const c10d::ReduceScatterOptions& options) {
  return timed(CollectiveKind::reduce_scatter, phantom_bytes(ins),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::_reduce_scatter_base(
    at::Tensor&, at::Tensor& in, const c10d::ReduceScatterOptions& options) {
  return timed(CollectiveKind::reduce_scatter, phantom_bytes(in),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::reduce_scatter_tensor_coalesced(
    Tensors&, Tensors& ins, const c10d::ReduceScatterOptions& options) {
  return timed(CollectiveKind::reduce_scatter, phantom_bytes(ins),
               options.asyncOp);
}

FakeGroup::Work FakeGroup::alltoall_base(at::Tensor&, at::Tensor& in,
                                         std::vector<std::int64_t>&,
                                         std::vector<std::int64_t>&,
                                         const c10d::AllToAllOptions& options) {
  return timed(CollectiveKind::all_to_all, phantom_bytes(in), options.asyncOp);
}

FakeGroup::Work FakeGroup::alltoall(Tensors&, Tensors& ins,
                                    const c10d::AllToAllOptions& options) {
  return timed(CollectiveKind::all_to_all, phantom_bytes(ins), options.asyncOp);
}

FakeGroup::Work FakeGroup::send(Tensors& tensors, int, int) {
  return timed(CollectiveKind::send, phantom_bytes(tensors), /*async=*/true);
}

FakeGroup::Work FakeGroup::recv(Tensors& tensors, int, int) {
  return timed(CollectiveKind::send, phantom_bytes(tensors), /*async=*/true);
}

FakeGroup::Work FakeGroup::recvAnysource(Tensors& tensors, int tag) {
  return recv(tensors, -1, tag);
}

FakeGroup::Work FakeGroup::barrier(const c10d::BarrierOptions&) {
  return c10::make_intrusive<FakeWork>();
}

void FakeGroup::startCoalescing() { coalesced_.emplace(); }

FakeGroup::Work FakeGroup::endCoalescing() {
  const Coalesced all =
      std::exchange(coalesced_, std::nullopt).value_or(Coalesced{});
  if (!all.kind) return c10::make_intrusive<FakeWork>();
  return timed(*all.kind, all.bytes, /*async=*/true);
}

}  // namespace lowtide::phantom
