// softmax and log_softmax of half precision into fp32: one kernel on CUDA, a
// cast first elsewhere.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/log_softmax_native.h>
#include <ATen/ops/softmax_native.h>

#include <optional>

#include "phantom/device/kernels.h"

namespace lowtide::phantom {
namespace {

using at::Tensor;

bool widens(const Tensor& input, std::optional<at::ScalarType> dtype) {
  return input.scalar_type() == at::kHalf && dtype == at::kFloat;
}

Tensor softmax(const Tensor& input, std::int64_t dim,
               std::optional<at::ScalarType> dtype) {
  if (widens(input, dtype)) return at::_softmax(input, dim, true);
  return at::native::softmax(input, dim, dtype);
}

Tensor log_softmax(const Tensor& input, std::int64_t dim,
                   std::optional<at::ScalarType> dtype) {
  if (widens(input, dtype)) return at::_log_softmax(input, dim, true);
  return at::native::log_softmax(input, dim, dtype);
}

}  // namespace

void register_wide_softmax(torch::Library& aten) {
  aten.impl("softmax.int", &softmax);
  aten.impl("log_softmax.int", &log_softmax);
}

}  // namespace lowtide::phantom
