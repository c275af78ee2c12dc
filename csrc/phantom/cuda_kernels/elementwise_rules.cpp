#include <ATen/core/Reduction.h>

#include "phantom/cuda_kernels/reduction.h"
#include "phantom/cuda_kernels/rules.h"

namespace lowtide::phantom {

// The product of gradient and output.
void softmax_backward(const CudaCall& call) {
  call.outputs();
  const auto product = temporary(bytes_of(call.tensor("grad_output")));
}

void contiguous_input(const CudaCall& call) {
  const auto copy = temporary(bytes_to_be_contiguous(call.tensor("input")));
  call.outputs();
}

void contiguous_gradient(const CudaCall& call) {
  const auto copy =
      temporary(bytes_to_be_contiguous(call.tensor("grad_output")));
  call.outputs();
}

// The loss of every element is computed, then reduced.
void reduced_loss(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  const bool reduced = call["reduction"].toInt() != at::Reduction::None;
  call.outputs();
  const auto elements = temporary(reduced ? bytes_of(self) : 0);
  if (!reduced) return;
  const auto value = c10::elementSize(accumulator_of(self.scalar_type()));
  const auto buffers = reduction_buffers(self, {}, {value});
  const auto partial_results = temporary(buffers.partial_results);
  const auto semaphores = temporary(buffers.semaphores);
}

// The same, in another order.
void huber_loss(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  const bool reduced = call["reduction"].toInt() != at::Reduction::None;
  const auto elements = temporary(reduced ? bytes_of(self) : 0);
  call.outputs();
}

// Probabilities are read in fp32.
void bernoulli(const CudaCall& call) {
  call.outputs();
  const c10::IValue p = call["p"];
  if (!p.isTensor() || p.toTensor().scalar_type() == at::kFloat) return;
  const auto wide = temporary(bytes_of(p.toTensor().numel(), at::kFloat));
}

// Sums of every channel, then factors of every group, two each.
void group_norm_backward(const CudaCall& call) {
  call.outputs();
  const std::int64_t batch = call["N"].toInt();
  const auto dtype = accumulator_of(call.tensor("input").scalar_type());
  const std::size_t sums = bytes_of(batch * call["C"].toInt(), dtype);
  const std::size_t factors = bytes_of(batch * call["group"].toInt(), dtype);
  const auto scales = temporary(sums), shifts = temporary(sums);
  const auto first = temporary(factors), second = temporary(factors);
}

}  // namespace lowtide::phantom
