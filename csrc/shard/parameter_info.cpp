#include "shard/parameter_info.h"

#include <c10/util/accumulate.h>

namespace lowtide::shard {

std::array<std::int64_t, 3> ParameterInfo::split(
    std::int64_t world_size) const {
  std::int64_t outer = 1;
  for (std::int64_t d = 0; d < shard_dim; ++d) {
    outer *= sizes[static_cast<std::size_t>(d)];
  }
  const auto numel = c10::multiply_integers(sizes);
  const auto parts = outer * world_size;
  return {outer, world_size, parts == 0 ? 0 : numel / parts};
}

std::vector<std::int64_t> ParameterInfo::local_sizes(std::int64_t world_size,
                                                     std::int64_t rows) const {
  auto local = sizes;
  auto& size = local[static_cast<std::size_t>(shard_dim)];
  size = shard_dim == 0 ? rows : size / world_size;
  return local;
}

}  // namespace lowtide::shard
