#include "phantom/cuda_kernels/cuda_call.h"

#include <ATen/AccumulateType.h>
#include <ATen/core/function_schema.h>

#include <utility>

#include "base/check.h"
#include "phantom/device/device_allocator.h"

namespace lowtide::phantom {

c10::DataPtr temporary(std::size_t bytes) {
  return device_allocator().allocate(bytes);
}

std::size_t bytes_of(std::int64_t numel, at::ScalarType dtype) {
  return static_cast<std::size_t>(numel) * c10::elementSize(dtype);
}

std::size_t bytes_of(const at::Tensor& tensor) {
  return bytes_of(tensor.numel(), tensor.scalar_type());
}

std::size_t bytes_to_be_contiguous(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? 0 : bytes_of(tensor);
}

at::ScalarType accumulator_of(at::ScalarType dtype) {
  return at::toAccumulateType(dtype, /*is_cuda=*/true);
}

CudaCall::CudaCall(const c10::OperatorHandle& op,
                   std::vector<c10::IValue> arguments,
                   std::function<void()> allocate_outputs)
    : schema_(op.schema()),
      arguments_(std::move(arguments)),
      allocate_outputs_(std::move(allocate_outputs)) {}

c10::IValue CudaCall::operator[](std::string_view name) const {
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    if (schema_.arguments()[i].name() == name) return arguments_[i];
  }
  return {};
}

const at::Tensor& CudaCall::tensor(std::string_view name) const {
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    if (schema_.arguments()[i].name() == name) return arguments_[i].toTensor();
  }
  throw Error(base::concat("lowtide: internal invariant failed: operator ",
                           schema_.name(), " has an argument ", name));
}

}  // namespace lowtide::phantom
