#include "spmd/typed_collectives.h"

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "base/check.h"
#include "base/torch_version.h"

namespace lowtide::spmd {
namespace {

using torch::autograd::variable_list;

// One transition's forward, without history.
class Run {
 public:
  Run(const Step& step, comm::Collectives& axis, Dims dims)
      : step_(step),
        axis_(axis),
        dims_(dims),
        label_(base::concat(kTypedLabel, operation_name(step.operation))) {}

  at::Tensor operator()(const at::Tensor& x) const {
    switch (step_.operation) {
      case Operation::all_gather:
        return all_gather(x);
      case Operation::reduce_scatter:
        return reduce_scatter(x);
      case Operation::all_reduce:
        return all_reduce(x);
      case Operation::all_to_all:
        return all_to_all(x);
      case Operation::convert:
        return convert(x);
      case Operation::reinterpret:
        return x.detach();
    }
    LOWTIDE_INVARIANT(false, "an operation has a function");
  }

 private:
  std::int64_t dimension(const at::Tensor& x, std::int64_t dim) const {
    if (dim < -x.dim() || dim >= x.dim()) {
      throw InvalidArgument(base::error_text(
          std::string(label_), "a dimension of the tensor",
          base::on_rank(base::concat(dim, " of ", x.dim()), axis_.rank(),
                        axis_.size()),
          "Pass dim= one that the tensor has; a scalar needs unsqueeze(0)."));
    }
    return at::maybe_wrap_dim(dim, x.dim());
  }

  std::int64_t part(const at::Tensor& x, std::int64_t dim) const {
    if (x.size(dim) % axis_.size() != 0) {
      throw InvalidArgument(base::error_text(
          std::string(label_),
          base::concat("dimension ", dim, " to be a multiple of ", axis_.size(),
                       ", the axis's ranks"),
          base::on_rank(base::concat(x.size(dim)), axis_.rank(), axis_.size()),
          "Pad it, or pass another dim=."));
    }
    return x.size(dim) / axis_.size();
  }

  at::Tensor all_gather(const at::Tensor& x) const {
    const std::int64_t dim = dimension(x, dims_.join);
    const at::Tensor first = x.movedim(dim, 0).contiguous();
    std::vector<std::int64_t> sizes = first.sizes().vec();
    sizes[0] *= axis_.size();
    const at::Tensor out = at::empty(sizes, first.options());
    std::vector<at::Tensor> outs = {out.view(-1).view(at::kByte)};
    std::vector<at::Tensor> ins = {first.view(-1).view(at::kByte)};
    axis_.all_gather(outs, ins, label_)->wait();
    return dim == 0 ? out : out.movedim(0, dim).contiguous();
  }

  at::Tensor reduce_scatter(const at::Tensor& x) const {
    const std::int64_t dim = dimension(x, dims_.split);
    const std::int64_t size = part(x, dim);
    at::Tensor first = x.movedim(dim, 0).contiguous();
    std::vector<std::int64_t> sizes = first.sizes().vec();
    sizes[0] = size;
    at::Tensor out = at::empty(sizes, first.options());
    axis_.reduce_scatter(out, first, comm::Reduction::sum, label_)->wait();
    return dim == 0 ? out : out.movedim(0, dim).contiguous();
  }

  at::Tensor all_reduce(const at::Tensor& x) const {
    at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
    axis_.all_reduce(sum, comm::Reduction::sum, label_)->wait();
    return sum;
  }

  at::Tensor all_to_all(const at::Tensor& x) const {
    const std::int64_t split = dimension(x, dims_.split);
    const std::int64_t join = dimension(x, dims_.join);
    part(x, split);
    at::Tensor sent = at::stack(x.chunk(axis_.size(), split)).contiguous();
    at::Tensor received = at::empty_like(sent);
    axis_.all_to_all(received, sent, label_)->wait();
    return at::cat(received.unbind(0), join);
  }

  at::Tensor convert(const at::Tensor& x) const {
    if (step_.dst == Type::V) {
      const std::int64_t dim = dimension(x, dims_.split);
      const std::int64_t size = part(x, dim);
      return x.narrow(dim, axis_.rank() * size, size).clone();
    }
    if (step_.src == Type::V) {
      const std::int64_t dim = dimension(x, dims_.join);
      std::vector<std::int64_t> sizes = x.sizes().vec();
      sizes[static_cast<std::size_t>(dim)] *= axis_.size();
      at::Tensor wide = at::zeros(sizes, x.options());
      wide.narrow(dim, axis_.rank() * x.size(dim), x.size(dim)).copy_(x);
      return wide;
    }
    if (step_.dst == Type::P && axis_.rank() != 0) return at::zeros_like(x);
    return x.detach();
  }

  Step step_;
  comm::Collectives& axis_;
  Dims dims_;
  std::string label_;
};

class TransitionNode final : public torch::autograd::Node {
 public:
  TransitionNode(const Step& backward, std::shared_ptr<comm::Collectives> axis,
                 Dims dims, std::string name)
      : backward_(backward),
        axis_(std::move(axis)),
        dims_(dims),
        name_(std::move(name)) {}

  std::string name() const override { return name_; }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {spmd::apply(gradients[0], backward_, axis_, dims_)};
  }

 private:
  Step backward_;
  std::shared_ptr<comm::Collectives> axis_;
  Dims dims_;
  std::string name_;
};

}  // namespace

at::Tensor apply(const at::Tensor& x, const Step& step,
                 std::shared_ptr<comm::Collectives> axis, Dims dims) {
  const Transition& entry = transition(step.operation, step.src, step.dst);
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = Run(step, *axis, dims)(x);
  }
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return result;
  const Dims back{dims.join, dims.split};
  auto node = base::make_node<TransitionNode>(
      entry.backward, std::move(axis), back,
      base::concat(kTypedLabel, operation_name(step.operation)));
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::set_history(result, node);
  return result;
}

}  // namespace lowtide::spmd
