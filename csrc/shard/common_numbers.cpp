#include "shard/common_numbers.h"

#include <limits>

namespace lowtide::shard {
namespace {

constexpr auto kNotKnown = std::numeric_limits<std::int64_t>::max();

}  // namespace

OwnNumbers::Compared OwnNumbers::to_compare() const {
  // The greatest of a number and of its negative: whether all are equal.
  const auto used = static_cast<std::int64_t>(used_hash >> 1);
  return {-output_rows, saved,
          graphs.kept,  graphs.recorded,
          listened,     used,
          -used,        calls_without_inputs,
          attached,     gather_ns > 0 ? gather_ns : kNotKnown,
          left_out};
}

CommonNumbers CommonNumbers::of(const OwnNumbers::Compared& greatest) {
  const auto [rows, saved, kept, recorded, listened, used, negative_used,
              without_inputs, attached, gather_ns, left_out] = greatest;
  return {.fewest_rows = -rows,
          .saved_by_any = saved != 0,
          .graphs_of_any = {kept, recorded},
          .listened_by_any = listened != 0,
          .used_alike = used == -negative_used,
          .calls_without_inputs_of_any = without_inputs != 0,
          .attached_on_any = attached != 0,
          .gather_ns = gather_ns == kNotKnown ? 0 : gather_ns,
          .left_out_by_any = left_out != 0};
}

}  // namespace lowtide::shard
