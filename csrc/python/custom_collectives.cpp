#include "python/custom_collectives.h"

#include <ATen/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "comm/tensor_lists.h"

namespace py = pybind11;

namespace lowtide::python {
namespace {

using comm::Kind;
using comm::Pending;
using comm::Reduction;
using comm::TensorLists;

// The object has been called: its result is copied into place when it is
// waited for.
class CustomWork final : public Pending {
 public:
  CustomWork(std::shared_ptr<comm::Wire> wire, at::Tensor input)
      : wire_(std::move(wire)), input_(std::move(input)) {}
  ~CustomWork() override {
    const py::gil_scoped_acquire gil;
    work_ = py::object();
  }

  std::vector<at::Tensor> outs;
  std::vector<at::Tensor> results;

  // Under the GIL; `call()` returns what the object did.
  template <typename Call>
  void start(Kind kind, const std::string& label, std::int64_t bytes,
             Call&& call) {
    if (!wire_) {
      work_ = call();
      return;
    }
    done_ = wire_->run(kind, label, bytes, [&] { work_ = call(); });
  }

  void wait() override {
    {
      const py::gil_scoped_acquire gil;
      if (work_ && !work_.is_none()) work_.attr("wait")();
      work_ = py::object();
    }
    abandon();
    for (std::size_t i = 0; i < outs.size(); ++i) outs[i].copy_(results[i]);
    outs.clear();
    results.clear();
    input_.reset();
  }

  void abandon() override {
    if (done_) wire_->wait(std::exchange(done_, nullptr));
  }

 private:
  std::shared_ptr<comm::Wire> wire_;
  at::Tensor input_;  // which the object reads until then
  comm::Wire::Point done_;
  py::object work_;
};

std::int64_t total(const std::vector<at::Tensor>& tensors) {
  std::int64_t numel = 0;
  for (const auto& tensor : tensors) numel += tensor.numel();
  return numel;
}

// [rows, columns] blocks of a flat matrix, one after the other.
std::vector<at::Tensor> blocks(const at::Tensor& flat, std::int64_t rows,
                               const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> result;
  std::int64_t column = 0;
  const auto matrix = flat.view({rows, -1});
  for (const auto& tensor : like) {
    const auto width = tensor.numel() / rows;
    result.push_back(matrix.narrow(1, column, width));
    column += width;
  }
  return result;
}

}  // namespace

CustomCollectives::CustomCollectives(
    std::shared_ptr<comm::C10dCollectives> base, py::object all_gather,
    py::object reduce_scatter)
    : base_(std::move(base)),
      all_gather_(std::move(all_gather)),
      reduce_scatter_(std::move(reduce_scatter)) {}

CustomCollectives::~CustomCollectives() {
  const py::gil_scoped_acquire gil;
  all_gather_ = reduce_scatter_ = py::object();
}

at::Tensor CustomCollectives::allocate(const py::object& object,
                                       std::int64_t numel,
                                       const at::Tensor& like) const {
  const auto size = py::make_tuple(numel);
  return py::cast<at::Tensor>(object.attr("allocate")(
      size, py::arg("dtype") = py::cast(like.scalar_type()),
      py::arg("device") = py::cast(like.device())));
}

std::shared_ptr<comm::Wire> CustomCollectives::wire(const at::Tensor& like) {
  if (!wire_ && !like.is_cpu()) {
    wire_ = std::make_shared<comm::Wire>(base_->group(), like.device());
  }
  return wire_;
}

std::unique_ptr<Pending> CustomCollectives::all_gather(
    std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
    const std::string& label) {
  auto lists = checked_lists(Kind::all_gather, outs, ins, size());
  const py::gil_scoped_acquire gil;
  if (all_gather_.is_none() || lists.empty()) {
    const py::gil_scoped_release no_gil;
    return base_->all_gather(outs, ins, label);
  }
  const auto numel = total(lists.ins);
  // In place, as FSDP2's: what registers buffers has one.
  const auto output = allocate(all_gather_, size() * numel, lists.ins[0]);
  const auto input = output.narrow(0, rank() * numel, numel);
  const auto places = blocks(input, 1, lists.ins);
  for (std::size_t i = 0; i < places.size(); ++i) {
    places[i].copy_(lists.ins[i].view({1, -1}));
  }
  const auto bytes = lists.full_bytes(Kind::all_gather);
  auto work = std::make_unique<CustomWork>(wire(input), input);
  work->start(Kind::all_gather, label, bytes, [&] {
    return all_gather_(
        py::arg("output_tensor") = output, py::arg("input_tensor") = input,
        py::arg("group") = base_->group()->get(), py::arg("async_op") = false);
  });
  for (const auto& out : lists.outs) {
    work->outs.push_back(out.view({size(), -1}));
  }
  work->results = blocks(output, size(), lists.outs);
  count(Kind::all_gather, bytes);
  return work;
}

std::unique_ptr<Pending> CustomCollectives::reduce_scatter(
    at::Tensor& out, at::Tensor& in, Reduction reduction,
    const std::string& label) {
  std::vector<at::Tensor> outs{out};
  std::vector<at::Tensor> ins{in};
  return reduce_scatter_coalesced(outs, ins, reduction, label);
}

std::unique_ptr<Pending> CustomCollectives::reduce_scatter_coalesced(
    std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
    Reduction reduction, const std::string& label) {
  auto lists = checked_lists(Kind::reduce_scatter, outs, ins, size());
  const py::gil_scoped_acquire gil;
  if (reduce_scatter_.is_none() || lists.empty()) {
    const py::gil_scoped_release no_gil;
    return base_->reduce_scatter_coalesced(outs, ins, reduction, label);
  }
  const auto numel = total(lists.outs);
  const auto input = allocate(reduce_scatter_, size() * numel, lists.ins[0]);
  const auto output = allocate(reduce_scatter_, numel, lists.ins[0]);
  const auto places = blocks(input, size(), lists.ins);
  for (std::size_t i = 0; i < places.size(); ++i) {
    places[i].copy_(lists.ins[i].view({size(), -1}));
  }
  const auto op =
      py::module_::import("torch.distributed")
          .attr("ReduceOp")
          .attr(reduction == Reduction::average && size() > 1 ? "AVG" : "SUM");
  const auto bytes = lists.full_bytes(Kind::reduce_scatter);
  auto work = std::make_unique<CustomWork>(wire(input), input);
  work->start(Kind::reduce_scatter, label, bytes, [&] {
    return reduce_scatter_(py::arg("output_tensor") = output,
                           py::arg("input_tensor") = input,
                           py::arg("group") = base_->group()->get(),
                           py::arg("op") = op, py::arg("async_op") = false);
  });
  for (const auto& one : lists.outs) work->outs.push_back(one.view({1, -1}));
  work->results = blocks(output, 1, lists.outs);
  count(Kind::reduce_scatter, bytes);
  return work;
}

std::unique_ptr<Pending> CustomCollectives::all_reduce(
    at::Tensor& tensor, Reduction reduction, const std::string& label) {
  return base_->all_reduce(tensor, reduction, label);
}

std::unique_ptr<Pending> CustomCollectives::all_to_all(
    at::Tensor& out, at::Tensor& in, const std::string& label) {
  return base_->all_to_all(out, in, label);
}

std::vector<std::int64_t> CustomCollectives::from_rank_zero(
    std::vector<std::int64_t> values, const std::string& label) {
  return base_->from_rank_zero(std::move(values), label);
}

}  // namespace lowtide::python
