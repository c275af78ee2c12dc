#include "ops/transfer_of.h"

#include <algorithm>
#include <array>

namespace lowtide::ops {
namespace {

struct Dimension {
  std::int64_t size;
  std::int64_t to;
  std::int64_t from;
};

bool has_kernel(const at::Tensor& tensor, c10::Device device) {
  const auto dtype = tensor.scalar_type();
  return tensor.device() == device &&
         (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
}

}  // namespace

std::optional<Transfer> transfer_of(const at::Tensor& to,
                                    const at::Tensor& from) {
  constexpr std::size_t kMost = 3;
  std::array<Dimension, kMost> dimensions{};  // innermost first
  std::size_t count = 0;
  for (std::int64_t d = to.dim(); d-- > 0;) {
    const Dimension next{to.size(d), to.stride(d), from.stride(d)};
    if (next.size == 1) {
      continue;
    }
    if (count == 0 && (next.to != 1 || next.from != 1)) {
      dimensions[count++] = {1, 1, 1};  // rows of one element
    }
    auto& last = dimensions[count == 0 ? 0 : count - 1];
    if (count > 0 && last.size > 1 && next.to == last.to * last.size &&
        next.from == last.from * last.size) {
      last.size *= next.size;
      continue;
    }
    if (count == kMost) {
      return std::nullopt;
    }
    dimensions[count++] = next;
  }
  while (count < kMost) {
    dimensions[count++] = {1, 0, 0};
  }
  const auto& [columns, rows, matrices] = dimensions;
  return Transfer{to.mutable_data_ptr(),
                  from.const_data_ptr(),
                  columns.size,
                  rows.size,
                  rows.to,
                  rows.from,
                  matrices.to,
                  matrices.from,
                  to.numel()};
}

Transfers transfers_of(at::TensorList to, at::TensorList from) {
  Transfers all;
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (to[i].numel() == 0) {
      continue;
    }
    const auto device = to[0].device();
    const auto transfer =
        has_kernel(to[i], device) && has_kernel(from[i], device)
            ? transfer_of(to[i], from[i])
            : std::nullopt;
    if (!transfer) {
      all.others.push_back(i);
      continue;
    }
    const auto to_dtype = to[i].scalar_type();
    const auto from_dtype = from[i].scalar_type();
    auto list = std::find_if(
        all.lists.begin(), all.lists.end(), [&](const TransferList& other) {
          return other.to == to_dtype && other.from == from_dtype;
        });
    if (list == all.lists.end()) {
      list = all.lists.insert(list, {to_dtype, from_dtype, {}});
    }
    list->transfers.push_back(*transfer);
  }
  return all;
}

}  // namespace lowtide::ops
