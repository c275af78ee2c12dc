// What CUDA's kernels allocate besides their outputs, and in which order.
//
// Figures are of torch 2.11 on an H100 (132 multiprocessors); they follow its
// sources and are compared with its operators, run dry, in
// tests/python/phantom/test_operators_against_torch.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <functional>
#include <string_view>
#include <vector>

namespace lowtide::phantom {

inline constexpr std::int64_t kMultiprocessors = 132;
inline constexpr std::int64_t kThreadsPerMultiprocessor = 2048;

// From the current stream's pool; nothing for 0 bytes.  Given back when the
// result dies.
[[nodiscard]] c10::DataPtr temporary(std::size_t bytes);

std::size_t bytes_of(std::int64_t numel, at::ScalarType dtype);
// Of a copy of the tensor.
std::size_t bytes_of(const at::Tensor& tensor);
// bytes_of if a kernel that needs dense rows would copy the tensor, else 0.
std::size_t bytes_to_be_contiguous(const at::Tensor& tensor);
// What CUDA sums values of this type in.
at::ScalarType accumulator_of(at::ScalarType dtype);

// A call of an operator, for an AllocationRule to look at.
class CudaCall {
 public:
  CudaCall(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments,
           std::function<void()> allocate_outputs);

  // By the argument's name in the schema; None if there is no such argument.
  c10::IValue operator[](std::string_view name) const;
  const at::Tensor& tensor(std::string_view name) const;
  const std::vector<c10::IValue>& arguments() const { return arguments_; }

  // Runs the kernel and gives its results bytes; a rule calls it once.
  void outputs() const { allocate_outputs_(); }

 private:
  const c10::FunctionSchema& schema_;
  std::vector<c10::IValue> arguments_;
  std::function<void()> allocate_outputs_;
};

// Allocates what CUDA's kernel would, in its order.
using AllocationRule = void (*)(const CudaCall& call);

}  // namespace lowtide::phantom
