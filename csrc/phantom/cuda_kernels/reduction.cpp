#include "phantom/cuda_kernels/reduction.h"

#include <ATen/TensorIterator.h>
#include <ATen/ceil_div.h>
#include <ATen/native/ReduceOpsUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "phantom/cuda_kernels/cuda_call.h"

namespace lowtide::phantom {
namespace {

using at::ceil_div;

std::int64_t last_power_of_two(std::int64_t n) {
  std::int64_t power = 1;
  while (power * 2 <= n) power *= 2;
  return power;
}

// What the kernel is launched with.  Names follow the source.
struct Config {
  std::int64_t num_outputs, num_inputs;
  std::int64_t output_vector = 1;
  std::int64_t block_width = 1, block_height = 1;
  std::int64_t step_input = 1, step_output = 1;
  std::int64_t blocks_per_output = 1;
  bool reduces_over_x = false, reduces_over_y = false;

  void set_block(std::int64_t dim0, std::int64_t dim1, std::int64_t most) {
    constexpr std::int64_t kWarp = 32;
    const std::int64_t threads = most / output_vector;
    const auto fit = [&](std::int64_t dim) {
      return dim < threads ? last_power_of_two(dim) : threads;
    };
    block_width = std::min(fit(dim0), kWarp);
    block_height = std::min(fit(dim1), threads / block_width);
    block_width = std::min(fit(dim0), threads / block_height);
  }

  std::int64_t values_per_thread() const {
    return ceil_div(num_inputs, step_input);
  }
  std::int64_t grid_width() const {
    return ceil_div(num_outputs / output_vector, step_output);
  }
};

// How many neighbouring outputs a thread can read at once.
std::int64_t output_vector(const at::TensorIterator& iter,
                           std::int64_t itemsize, std::uintptr_t address) {
  std::int64_t size = 4;
  const auto must_divide = [&](std::int64_t n) {
    while (n % size != 0) size /= 2;
  };
  must_divide(static_cast<std::int64_t>(address) / itemsize);
  const int output = iter.num_reduce_dims();
  must_divide(iter.shape()[output]);
  const auto strides = iter.strides(1);
  for (int i = 0; i < static_cast<int>(strides.size()); ++i) {
    if (i != output) must_divide(strides[i] / itemsize);
  }
  return size;
}

void split_over_blocks(Config& config) {
  constexpr std::int64_t kFewest = 16, kMost = 256;  // values of a thread
  const std::int64_t values = config.values_per_thread();
  const std::int64_t threads = config.block_width * config.block_height;
  const std::int64_t blocks =
      kMultiprocessors * (kThreadsPerMultiprocessor / threads);
  const std::int64_t width = config.grid_width();
  if (!config.reduces_over_y || values < kMost || width > blocks) return;
  config.blocks_per_output =
      std::max(std::min(ceil_div(blocks, width), ceil_div(values, kFewest)),
               ceil_div(values, kMost));
}

Config configure(const at::TensorIterator& iter, std::int64_t itemsize,
                 std::uintptr_t address, const ReductionKernel& kernel) {
  constexpr std::int64_t kVector = 4, kMostThreads = 512, kManyValues = 256;
  Config config;
  config.num_outputs = iter.num_output_elements();
  config.num_inputs = iter.numel() / config.num_outputs;
  const auto strides = iter.strides(1);
  const int reduced = iter.num_reduce_dims();
  const bool along_fastest =
      reduced == iter.ndim() || strides[0] < strides[reduced];
  std::int64_t dim0 = along_fastest ? config.num_inputs : config.num_outputs;
  const std::int64_t dim1 =
      along_fastest ? config.num_outputs : config.num_inputs;
  if (strides[along_fastest ? 0 : reduced] == itemsize) {
    if (!along_fastest) {
      config.output_vector = output_vector(iter, itemsize, address);
      dim0 /= config.output_vector;
    } else if (dim0 >= 128 && reduced == 1 &&
               kernel.values_at_once >= kVector) {
      dim0 /= kVector;
    }
  }
  config.set_block(dim0, dim1, kMostThreads);
  config.reduces_over_x = along_fastest;
  (along_fastest ? config.step_input : config.step_output) *=
      config.block_width;
  const std::int64_t values = config.values_per_thread();
  config.reduces_over_y =
      values >= config.block_height * 16 || values >= kManyValues;
  (config.reduces_over_y ? config.step_input : config.step_output) *=
      config.block_height;
  split_over_blocks(config);
  return config;
}

}  // namespace

ReductionBuffers reduction_buffers(const at::Tensor& self,
                                   at::OptionalIntArrayRef dims,
                                   const ReductionKernel& kernel) {
  if (self.numel() == 0 || self.dim() == 0) return {};
  const auto itemsize = static_cast<std::int64_t>(self.itemsize());
  const auto meta = at::empty_strided(self.sizes(), self.strides(),
                                      self.options().device(c10::kMeta));
  at::Tensor result = at::empty({0}, meta.options());
  const auto iter = at::native::make_reduction(
      "phantom", result, meta, dims, /*keepdim=*/false, meta.scalar_type());
  if (iter.numel() == 0 || iter.ndim() == 0) return {};
  const Config config = configure(
      iter, itemsize, reinterpret_cast<std::uintptr_t>(self.const_data_ptr()),
      kernel);
  if (config.blocks_per_output <= 1) return {};
  std::int64_t values = config.num_outputs * config.blocks_per_output;
  if (!config.reduces_over_x) {
    values *= config.block_width * config.output_vector;
  }
  constexpr std::size_t kSemaphore = 4;
  return {static_cast<std::size_t>(values) * kernel.value_bytes,
          static_cast<std::size_t>(config.grid_width()) * kSemaphore};
}

}  // namespace lowtide::phantom
