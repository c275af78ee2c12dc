// FSDP's copies are one kernel each, over a grid with as many blocks as the
// tensors need together; which block does what is a table that goes to the
// device with the launch.
#include <ATen/ceil_div.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "phantom/cuda_kernels/rules.h"

namespace lowtide::phantom {
namespace {

using at::ceil_div;

constexpr std::int64_t kThreads = 128, kBytesPerThread = 16,
                       kBytesPerBlock = kThreads * kBytesPerThread;

bool dense(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) {
    return t.is_non_overlapping_and_dense();
  });
}

c10::DataPtr table(std::int64_t entries) {
  return temporary(bytes_of(entries, at::kLong));
}

std::int64_t product(at::IntArrayRef sizes, std::int64_t first) {
  std::int64_t numel = 1;
  for (auto dim = static_cast<std::size_t>(first); dim < sizes.size(); ++dim) {
    numel *= sizes[dim];
  }
  return numel;
}

}  // namespace

void chunk_cat(const CudaCall& call) {
  const auto tensors = call["tensors"].toTensorVector();
  const std::int64_t dim = call["dim"].toInt();
  const std::int64_t num_chunks = call["num_chunks"].toInt();
  call.outputs();
  const c10::IValue out = call["out"];
  const auto to = out.isTensor() ? out.toTensor().scalar_type()
                                 : tensors.front().scalar_type();
  const auto from = tensors.front().scalar_type();
  const bool fast = dense(tensors) &&
                    (to == from || (from == at::kBFloat16 && to == at::kFloat));
  if (!fast) return;
  const auto count = static_cast<std::int64_t>(tensors.size());
  std::int64_t blocks = 0;
  for (const at::Tensor& tensor : tensors) {
    const std::int64_t rows = ceil_div(tensor.size(dim), num_chunks);
    const std::int64_t columns = product(tensor.sizes(), dim + 1);
    blocks += ceil_div(static_cast<std::int64_t>(bytes_of(rows * columns, to)),
                       kBytesPerBlock);
  }
  const auto packed = table(blocks + 6 * count + 2);
}

void split_with_sizes_copy(const CudaCall& call) {
  const at::Tensor& self = call.tensor("self");
  const auto sizes = call["split_sizes"].toIntVector();
  const auto outs = call["out"].toTensorVector();
  std::int64_t dim = call["dim"].toInt();
  if (dim < 0) dim += self.dim();
  call.outputs();
  const bool same =
      std::all_of(outs.begin(), outs.end(), [&](const at::Tensor& out) {
        return out.scalar_type() == self.scalar_type();
      });
  if (!same || !dense(outs) || !self.is_non_overlapping_and_dense()) return;

  const std::int64_t num_chunks =
      self.numel() / std::max<std::int64_t>(1, product(self.sizes(), dim));
  const auto chunk_bytes = [&](std::int64_t size) {
    return static_cast<std::int64_t>(
        bytes_of(size * self.stride(dim), self.scalar_type()));
  };
  const auto blocks_of = [&](std::int64_t bytes_per_block) {
    std::int64_t blocks = 0;
    for (const std::int64_t size : sizes) {
      blocks += ceil_div(chunk_bytes(size), bytes_per_block);
    }
    return blocks;
  };
  // Twice as many blocks as fit; beyond that each block does more.
  constexpr std::int64_t kMostBlocks =
      kMultiprocessors * kThreadsPerMultiprocessor / kThreads * 2;
  const std::int64_t work =
      ceil_div(blocks_of(kBytesPerBlock) * num_chunks, kMostBlocks);
  const auto chunks_per_block = std::min<std::int64_t>(
      static_cast<std::int64_t>(std::ceil(std::sqrt(work))), num_chunks);
  const std::int64_t steps =
      ceil_div(work, std::max<std::int64_t>(1, chunks_per_block));
  const auto count = static_cast<std::int64_t>(sizes.size());
  const auto packed =
      table(blocks_of(kBytesPerBlock * std::max<std::int64_t>(1, steps)) +
            4 * count + 1);
}

}  // namespace lowtide::phantom
