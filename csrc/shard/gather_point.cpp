#include "shard/gather_point.h"

#include <limits>
#include <numeric>

namespace lowtide::shard {
namespace {

constexpr std::int64_t kRanksOfANode = 8;
constexpr std::int64_t kFlopsPerByteOfMemory = 300;
constexpr std::int64_t kFlopsPerByteInANode = 3000;
constexpr std::int64_t kFlopsPerByteBetweenNodes = 20000;
constexpr std::int64_t kFlopsPerElementAndToken = 4;

}  // namespace

std::int64_t elements_that_cover(std::int64_t bytes, std::int64_t ranks,
                                 std::int64_t tokens) {
  if (tokens <= 0) {
    return std::numeric_limits<std::int64_t>::max();
  }
  const auto rate = ranks == 1               ? kFlopsPerByteOfMemory
                    : ranks <= kRanksOfANode ? kFlopsPerByteInANode
                                             : kFlopsPerByteBetweenNodes;
  const auto received = ranks == 1 ? bytes : bytes / ranks * (ranks - 1);
  return received * rate / (kFlopsPerElementAndToken * tokens);
}

std::size_t gradients_before_gather(c10::ArrayRef<std::int64_t> elements,
                                    std::int64_t cover) {
  auto to_come =
      std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
  std::size_t before = 0;
  while (before < elements.size() && to_come - elements[before] >= cover) {
    to_come -= elements[before++];
  }
  return before;
}

}  // namespace lowtide::shard
