#include "comm/c10d_collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/torch_version.h"
#include "comm/call_observer.h"
#include "comm/nccl_group.h"
#include "comm/python_state.h"
#include "comm/tensor_lists.h"
#include "comm/wire.h"

namespace lowtide::comm {
namespace {

// [Note: Averages]
// Gloo's AVG is the sum, then a division in the reduced dtype, bit for bit,
// plain and coalesced.  NCCL's is a sum of products with 1 / N for floats: the
// same bits where N is a power of two and no product is subnormal.  With one
// rank the sum is the average.
c10d::ReduceOp reduce_op(Reduction reduction, std::int64_t size) {
  return reduction == Reduction::average && size > 1 ? c10d::ReduceOp::AVG
                                                     : c10d::ReduceOp::SUM;
}

c10d::ReduceScatterOptions options_for(Reduction reduction, std::int64_t size,
                                       bool async) {
  c10d::ReduceScatterOptions options;
  options.asyncOp = async;
  options.reduceOp = reduce_op(reduction, size);
  return options;
}

std::string backend_name(c10d::ProcessGroup& group,
                         c10::DeviceType device_type) {
  std::set<std::string> supported;
  for (const c10::Device& device : group.getDeviceTypes()) {
    if (device.type() == device_type) {
      return group.getBackend(device_type)->getBackendName();
    }
    supported.insert(c10::DeviceTypeName(device.type(), /*lower_case=*/true));
  }
  std::string list;
  for (const std::string& name : supported) {
    list += (list.empty() ? "" : ", ") + name;
  }
  const std::string wanted =
      c10::DeviceTypeName(device_type, /*lower_case=*/true);
  throw InvalidArgument(base::error_text(
      "process group", base::concat("a backend for ", wanted, " tensors"),
      base::on_rank(base::concat("one for ", list.empty() ? "nothing" : list),
                    group.getRank(), group.getSize()),
      base::concat("Pass init_process_group or init_device_mesh a backend for ",
                   wanted, ", or move the model.")));
}

// [Note: Lists on gloo]
// ProcessGroupGloo notes the name of the last work that its two worker threads
// began and finished in plain std::strings, which both threads assign at once.
// That is harmless only as long as no name needs the heap: a coalesced
// all-gather's is longer, and two in flight corrupted it (torch 2.11).  So a
// list is gathered tensor by tensor there; every other name is short.  A call
// costs gloo what half a MiB costs it: lists of up to kPackedBytes are copied
// into one tensor and back.
bool is_gloo(std::string_view backend) { return backend.ends_with("gloo"); }

// Also "nccl2", which torch has from 2.14 on, and "nccl-lazy".
bool is_nccl(std::string_view backend) { return backend.starts_with("nccl"); }

std::shared_ptr<Wire> wire_for(std::string_view backend,
                               const std::shared_ptr<BorrowedGroup>& group,
                               c10::Device device) {
  return is_nccl(backend) && !device.is_cpu()
             ? std::make_shared<Wire>(group, device)
             : nullptr;
}

constexpr std::int64_t kPackedBytes = std::int64_t{1} << 20;

// The pieces of a list, one behind the other, and what comes of them.
struct PackedList {
  at::Tensor piece;  // [numel of all ins]
  at::Tensor full;   // [ranks * numel of all ins]

  PackedList(const TensorLists& lists, std::int64_t size) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> pieces;
    for (const auto& in : lists.ins) pieces.push_back(in.view(-1));
    piece = at::cat(pieces);
    full = at::empty({size * piece.numel()}, piece.options());
  }

  void unpack(const TensorLists& lists) const {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto rows = full.view({-1, piece.numel()});
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < lists.outs.size(); ++i) {
      const auto length = lists.ins[i].numel();
      lists.outs[i].view({-1, length}).copy_(rows.narrow(1, begin, length));
      begin += length;
    }
  }
};

}  // namespace

class C10dCollectives::Work final : public Pending {
 public:
  Work(const C10dCollectives& owner, Kind kind, std::string label,
       TensorLists lists)
      : kind_(kind),
        label_(std::move(label)),
        rank_(owner.rank()),
        size_(owner.size()),
        wire_(owner.wire_),
        lists_(std::move(lists)) {}

  // `issue(outs, ins)` starts the collective, or a part of it, and returns its
  // Work, if it has one.  When it throws, nothing is in flight any more.
  template <typename Issue>
  void start(Issue&& issue) {
    const IssuedBy issuer(label_);
    const WithoutPythonState state;
    // Autograd has no part in it, and its fallback boxes every argument.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      if (!wire_) {
        parts_.push_back(issue(lists_.outs, lists_.ins));
        return;
      }
      done_ = wire_->run(kind_, label_, lists_.full_bytes(kind_), [&] {
        auto part = issue(lists_.outs, lists_.ins);
        if (part) parts_.push_back(std::move(part));
      });
    } catch (const std::exception& cause) {
      finish_parts();
      throw collective_failed(kind_, label_, cause, rank_, size_);
    }
  }

  // The same for a list, as one launch of NCCL's.  See [Note: Lists on nccl2].
  template <typename Issue>
  void start_grouped(c10d::Backend& backend, Issue&& issue) {
    start([&](auto& outs, auto& ins) {
      NcclGroup group;
      issue(outs, ins);
      group.launch();
      auto none = at::empty({0}, ins[0].options());
      c10d::AllgatherOptions options;
      options.asyncOp = false;
      return backend._allgather_base(none, none, options);
    });
  }

  void wait() override {
    const auto failure = finish_parts();
    const TensorLists released_on_return = std::exchange(lists_, {});
    const auto packed = std::exchange(packed_, {});
    if (!failure) {
      if (packed) packed->unpack(released_on_return);
      return;
    }
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& cause) {
      throw collective_failed(kind_, label_, cause, rank_, size_);
    }
  }

  // Other backends keep what they work on.
  void abandon() override { join(); }

  // The same for a list that travels as one tensor.
  template <typename Issue>
  void start_packed(Issue&& issue) {
    packed_.emplace(lists_, size_);
    start([&](auto&, auto&) { return issue(packed_->full, packed_->piece); });
  }

  const TensorLists& lists() const { return lists_; }

 private:
  // Waits for all of them; what the first that failed threw.
  std::exception_ptr finish_parts() {
    std::exception_ptr failure;
    for (const auto& part : std::exchange(parts_, {})) {
      try {
        if (!part->wait()) throw std::runtime_error("the group was aborted");
      } catch (const std::exception&) {
        if (!failure) failure = std::current_exception();
      }
    }
    join();
    return failure;
  }

  void join() {
    if (done_) wire_->wait(std::exchange(done_, nullptr));
  }

  Kind kind_;
  std::string label_;
  std::int64_t rank_;
  std::int64_t size_;
  std::shared_ptr<Wire> wire_;
  TensorLists lists_;
  std::optional<PackedList> packed_;
  std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
  Wire::Point done_;  // on the wire
};

C10dCollectives::C10dCollectives(std::shared_ptr<BorrowedGroup> group,
                                 c10::Device device)
    : group_(std::move(group)),
      device_(device),
      backend_(backend_name(*group_->get(), device.type())),
      wire_(wire_for(backend_, group_, device)),
      gathers_lists_(!is_gloo(backend_)),
      groups_lists_(wire_ && groups_lists(backend_)) {}

C10dCollectives::~C10dCollectives() = default;

template <typename Issue>
void C10dCollectives::start_list(Work& work, Issue&& issue) {
  if (groups_lists_ && work.lists().ins.size() > 1) {
    work.start_grouped(*group_->get()->getBackend(device_.type()), issue);
  } else {
    work.start(issue);
  }
}

std::unique_ptr<Pending> C10dCollectives::all_gather(
    std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
    const std::string& label) {
  auto work = std::make_unique<Work>(
      *this, Kind::all_gather, label,
      checked_lists(Kind::all_gather, outs, ins, size()));
  if (work->lists().empty()) return work;
  const auto group = group_->get();
  c10d::AllgatherOptions options;
  options.asyncOp = async();
  if (gathers_lists_) {
    start_list(*work, [&](auto& full, auto& pieces) {
      return std::invoke(base::all_gather_single_coalesced, *group, full,
                         pieces, options);
    });
  } else if (work->lists().outs.size() > 1 &&
             work->lists().full_bytes(Kind::all_gather) <= kPackedBytes) {
    work->start_packed([&](auto& full, auto& piece) {
      return std::invoke(base::all_gather_single, *group, full, piece, options);
    });
  } else {
    for (std::size_t i = 0; i < work->lists().outs.size(); ++i) {
      work->start([&](auto& full, auto& pieces) {
        return std::invoke(base::all_gather_single, *group, full[i], pieces[i],
                           options);
      });
    }
  }
  count(Kind::all_gather, work->lists().full_bytes(Kind::all_gather));
  return work;
}

std::unique_ptr<Pending> C10dCollectives::reduce_scatter(
    at::Tensor& out, at::Tensor& in, Reduction reduction,
    const std::string& label) {
  auto work = std::make_unique<Work>(
      *this, Kind::reduce_scatter, label,
      checked_lists(Kind::reduce_scatter, {out}, {in}, size()));
  if (work->lists().empty()) return work;
  const auto group = group_->get();
  work->start([&](auto& pieces, auto& full) {
    return std::invoke(base::reduce_scatter_single, *group, pieces[0], full[0],
                       options_for(reduction, size(), async()));
  });
  count(Kind::reduce_scatter, work->lists().full_bytes(Kind::reduce_scatter));
  return work;
}

std::unique_ptr<Pending> C10dCollectives::reduce_scatter_coalesced(
    std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
    Reduction reduction, const std::string& label) {
  auto work = std::make_unique<Work>(
      *this, Kind::reduce_scatter, label,
      checked_lists(Kind::reduce_scatter, outs, ins, size()));
  if (work->lists().empty()) return work;
  const auto group = group_->get();
  start_list(*work, [&](auto& pieces, auto& full) {
    return std::invoke(base::reduce_scatter_single_coalesced, *group, pieces,
                       full, options_for(reduction, size(), async()));
  });
  count(Kind::reduce_scatter, work->lists().full_bytes(Kind::reduce_scatter));
  return work;
}

std::unique_ptr<Pending> C10dCollectives::all_reduce(at::Tensor& tensor,
                                                     Reduction reduction,
                                                     const std::string& label) {
  auto work = std::make_unique<Work>(
      *this, Kind::all_reduce, label,
      checked_lists(Kind::all_reduce, {tensor}, {tensor}, size()));
  if (work->lists().empty() || size() == 1) return work;
  const auto group = group_->get();
  work->start([&](auto& tensors, auto&) {
    c10d::AllreduceOptions options;
    options.asyncOp = async();
    options.reduceOp = reduce_op(reduction, size());
    return group->allreduce(tensors, options);
  });
  count(Kind::all_reduce, work->lists().full_bytes(Kind::all_reduce));
  return work;
}

std::unique_ptr<Pending> C10dCollectives::all_to_all(at::Tensor& out,
                                                     at::Tensor& in,
                                                     const std::string& label) {
  auto work = std::make_unique<Work>(
      *this, Kind::all_to_all, label,
      checked_lists(Kind::all_to_all, {out}, {in}, size()));
  if (work->lists().empty()) return work;
  const auto group = group_->get();
  work->start([&](auto& received, auto& sent) {
    c10d::AllToAllOptions options;
    options.asyncOp = async();
    std::vector<std::int64_t> equal_parts;
    return std::invoke(base::all_to_all_single, *group, received[0], sent[0],
                       equal_parts, equal_parts, options);
  });
  count(Kind::all_to_all, work->lists().full_bytes(Kind::all_to_all));
  return work;
}

std::vector<std::int64_t> C10dCollectives::from_rank_zero(
    std::vector<std::int64_t> values, const std::string& label) {
  if (size() == 1 || values.empty()) return values;
  const auto host = at::TensorOptions().dtype(at::kLong);
  const auto mine =
      at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())},
                    host)
          .to(device_, at::kLong, /*non_blocking=*/false, /*copy=*/true);
  const auto group = group_->get();
  Work work(*this, Kind::broadcast, label, {{mine}, {}});
  work.start([&](auto& tensors, auto&) {
    c10d::BroadcastOptions options;
    options.asyncOp = async();
    return group->broadcast(tensors, options);
  });
  work.wait();
  count(Kind::broadcast, static_cast<std::int64_t>(mine.nbytes()));
  // Rank 0 has them, and a fake group brings none; a device that only
  // simulates memory could not even give back what it was given.
  if (rank() == 0 || backend_ == "fake") return values;
  const auto received = mine.cpu();
  const auto* begin = received.const_data_ptr<std::int64_t>();
  return {begin, begin + values.size()};
}

}  // namespace lowtide::comm
