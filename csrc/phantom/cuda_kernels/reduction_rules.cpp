#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "phantom/cuda_kernels/reduction.h"
#include "phantom/cuda_kernels/rules.h"

namespace lowtide::phantom {
namespace {

std::size_t itemsize(at::ScalarType dtype) { return c10::elementSize(dtype); }

// None, and an empty list, mean all.
std::optional<std::vector<std::int64_t>> dims_of(const CudaCall& call) {
  const c10::IValue dims = call["dim"];
  if (dims.isIntList()) return dims.toIntVector();
  if (dims.isInt()) return std::vector<std::int64_t>{dims.toInt()};
  return std::nullopt;
}

void reduce(const CudaCall& call, const at::Tensor& self,
            const ReductionKernel& kernel) {
  const auto dims = dims_of(call);
  const auto buffers = reduction_buffers(
      self, dims ? at::OptionalIntArrayRef(*dims) : at::OptionalIntArrayRef(),
      kernel);
  const auto partial_results = temporary(buffers.partial_results);
  const auto semaphores = temporary(buffers.semaphores);
}

// A value and its index, as CUDA's kernel keeps the two.
std::size_t pair_bytes(at::ScalarType dtype) {
  return 8 + std::max<std::size_t>(8, itemsize(dtype));
}

}  // namespace

// Integers and booleans are summed as int64, in a copy.
void sum_like(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  call.outputs();
  const auto dtype = self.scalar_type();
  if (!c10::isIntegralType(dtype, true) || dtype == at::kLong) {
    reduce(call, self, {itemsize(accumulator_of(dtype))});
    return;
  }
  const auto copy = temporary(bytes_of(self.numel(), at::kLong));
  const auto like = self.options().device(c10::kMeta).dtype(at::kLong);
  reduce(call, at::empty(self.sizes(), like), {itemsize(at::kLong)});
}

void extremum(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  call.outputs();
  reduce(call, self, {itemsize(self.scalar_type())});
}

void arg_extremum(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  call.outputs();
  reduce(call, self, {pair_bytes(self.scalar_type())});
}

void truth(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  call.outputs();
  reduce(call, self, {itemsize(at::kBool)});
}

// Mean, sum of squares and two counts.
void variance(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  call.outputs();
  const std::size_t value = itemsize(accumulator_of(self.scalar_type()));
  reduce(call, self, {4 * value, /*values_at_once=*/2});
}

// The sum of a mask, which is widened for it.
void count_nonzero(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  const auto mask = temporary(bytes_of(self.numel(), at::kBool));
  call.outputs();
  const auto widened = temporary(bytes_of(self.numel(), at::kLong));
}

}  // namespace lowtide::phantom
