#include "spmd/replicas.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

namespace lowtide::spmd {
namespace {

// [ranks][values]
std::vector<std::vector<std::int64_t>> exchange(
    comm::Collectives& axis, const c10::Device& device,
    const std::vector<std::int64_t>& values) {
  const auto count = static_cast<std::int64_t>(values.size());
  at::Tensor mine = at::empty({count}, at::kLong);
  std::memcpy(mine.mutable_data_ptr(), values.data(), mine.nbytes());
  mine = mine.to(device);
  const at::Tensor all = at::empty({axis.size() * count}, mine.options());
  std::vector<at::Tensor> outs = {all.view(at::kByte)};
  std::vector<at::Tensor> ins = {mine.view(at::kByte)};
  axis.all_gather(outs, ins, "comparison of replicas")->wait();
  const at::Tensor host = all.cpu();
  const auto* data = host.const_data_ptr<std::int64_t>();
  std::vector<std::vector<std::int64_t>> by_rank;
  for (std::int64_t rank = 0; rank < axis.size(); ++rank) {
    by_rank.emplace_back(data + rank * count, data + (rank + 1) * count);
  }
  return by_rank;
}

// `index` of every rank's values, if they differ there.
std::optional<Difference> difference_at(
    const std::vector<std::vector<std::int64_t>>& by_rank, std::size_t index) {
  Difference found{static_cast<std::int64_t>(index), {}};
  bool differ = false;
  for (const auto& values : by_rank) {
    found.by_rank.push_back(values[index]);
    differ |= values[index] != by_rank[0][index];
  }
  return differ ? std::optional(found) : std::nullopt;
}

}  // namespace

std::optional<Difference> first_difference(
    comm::Collectives& axis, const c10::Device& device,
    const std::vector<std::int64_t>& values) {
  if (axis.size() == 1 || axis.backend() == "fake") return std::nullopt;
  const at::NoGradGuard no_grad;
  const auto counts =
      exchange(axis, device, {static_cast<std::int64_t>(values.size())});
  if (auto found = difference_at(counts, 0)) {
    found->index = -1;
    return found;
  }
  if (values.empty()) return std::nullopt;
  const auto by_rank = exchange(axis, device, values);
  for (std::size_t index = 0; index < values.size(); ++index) {
    if (auto found = difference_at(by_rank, index)) return found;
  }
  return std::nullopt;
}

}  // namespace lowtide::spmd
