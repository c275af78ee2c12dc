#include "base/digest.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

namespace lowtide::base {
namespace {

std::uint64_t mix(std::uint64_t hash, std::uint64_t word) {
  hash ^= word;
  hash *= 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 29);
}

}  // namespace

std::int64_t digest(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor host = tensor.detach().cpu().contiguous();
  std::uint64_t hash = static_cast<std::uint64_t>(host.scalar_type());
  for (const std::int64_t size : host.sizes()) {
    hash = mix(hash, static_cast<std::uint64_t>(size));
  }
  const auto* bytes = static_cast<const char*>(host.const_data_ptr());
  for (std::size_t at = 0; at < host.nbytes(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(sizeof(word), host.nbytes() - at));
    hash = mix(hash, word);
  }
  return static_cast<std::int64_t>(hash);
}

}  // namespace lowtide::base
