#include "gather/axis.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Logging.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/check.h"
#include "base/tensor_over.h"
#include "base/trace.h"
#include "gather/site.h"

namespace lowtide::gather {
namespace {

using device::Stream;

std::vector<std::int64_t> scaled(const at::Tensor& tensor, std::int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes.at(0) = rows;
  return sizes;
}

}  // namespace

Arriving::Arriving(std::shared_ptr<memory::DeviceMemory> memory,
                   at::Tensor tensor, std::unique_ptr<comm::Pending> pending)
    : memory_(std::move(memory)),
      tensor_(std::move(tensor)),
      pending_(std::move(pending)) {}

Arriving::~Arriving() {
  if (!pending_) return;
  try {
    take();
  } catch (const std::exception& error) {
    LOG(ERROR) << "lowtide: a collective whose result nobody used: "
               << error.what();
  }
}

at::Tensor Arriving::take() {
  if (const auto pending = std::exchange(pending_, nullptr)) {
    const device::StreamScope scope(memory_->runtime(), Stream::compute);
    pending->wait();
    memory_->runtime().touches(Stream::compute, tensor_.const_data_ptr(),
                               tensor_.nbytes(), device::Access::read);
  }
  return std::exchange(tensor_, at::Tensor());
}

Axis::Axis(std::shared_ptr<comm::Collectives> collectives,
           std::shared_ptr<memory::DeviceMemory> memory, Compare compare,
           bool compare_bits)
    : collectives_(std::move(collectives)),
      memory_(std::move(memory)),
      compare_(std::move(compare)),
      compare_bits_(compare_bits) {}

std::string Axis::on_rank(const std::string& value) const {
  return base::on_rank(value, collectives_->rank(), collectives_->size());
}

Arriving Axis::all_gather(const at::Tensor& shard, const std::string& name,
                          bool ours) {
  const base::TraceRange trace("lowtide::sp_all_gather", name);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor in = shard.contiguous();
  const auto sizes = scaled(in, in.size(0) * size());
  at::Tensor out;
  if (ours) {
    const auto bytes =
        static_cast<std::int64_t>(in.nbytes()) * collectives_->size();
    out = base::tensor_over(
        base::owning_storage(
            memory_->lease(memory::Category::activations, name, bytes), bytes),
        in.scalar_type(), sizes, c10::contiguous_strides(sizes), 0);
  } else {
    out = at::empty(sizes, in.options());
  }
  std::vector<at::Tensor> outs{base::bytes_of(out)};
  std::vector<at::Tensor> ins{base::bytes_of(in)};
  auto& runtime = memory_->runtime();
  runtime.wait(Stream::gather, runtime.record(Stream::compute));
  const device::StreamScope scope(runtime, Stream::gather);
  return {memory_, out, collectives_->all_gather(outs, ins, name)};
}

Arriving Axis::reduce_scatter(const at::Tensor& partial,
                              const std::string& name) {
  const base::TraceRange trace("lowtide::sp_reduce_scatter", name);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor in = partial.contiguous();
  if (in.size(0) % size() != 0) {
    throw InvalidArgument(base::error_text(
        name,
        base::concat("a number of rows that the group's size ", size(),
                     " divides"),
        on_rank(base::concat(in.sizes())),
        "Pad the sequence to a multiple of the group's size."));
  }
  at::Tensor out = at::empty(scaled(in, in.size(0) / size()), in.options());
  auto& runtime = memory_->runtime();
  runtime.wait(Stream::reduce, runtime.record(Stream::compute));
  const device::StreamScope scope(runtime, Stream::reduce);
  at::Tensor flat_out = out.flatten();
  at::Tensor flat_in = in.flatten();
  return {memory_, out,
          collectives_->reduce_scatter(flat_out, flat_in, comm::Reduction::sum,
                                       name)};
}

void Axis::announce(const std::string& line) {
  {
    const std::lock_guard lock(mutex_);
    if (!agreed_) first_step_.push_back(line);
    if (!known_.insert(line).second) return;
  }
  compare_({line});
}

void Axis::agree() {
  std::vector<std::string> lines;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(agreed_, true)) return;
    lines = std::move(first_step_);
  }
  compare_(lines);
}

std::int64_t Axis::enter(const std::weak_ptr<Site>& site) {
  const std::lock_guard lock(mutex_);
  sites_.emplace(num_sites_, site);
  return num_sites_++;
}

void Axis::leave(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  sites_.erase(number);
}

void Axis::prefetch_before(std::int64_t number) {
  std::vector<std::shared_ptr<Site>> earlier;  // the last one first
  {
    const std::lock_guard lock(mutex_);
    for (auto at = sites_.lower_bound(number); at != sites_.begin();) {
      if (auto site = (--at)->second.lock()) earlier.push_back(std::move(site));
    }
  }
  for (const auto& site : earlier) {
    if (site->prefetch() != Site::Ahead::not_needed) return;
  }
}

std::map<std::string, Figures> Axis::figures() const {
  const std::lock_guard lock(mutex_);
  return figures_;
}

void Axis::reset_figures() {
  const std::lock_guard lock(mutex_);
  figures_.clear();
}

}  // namespace lowtide::gather
