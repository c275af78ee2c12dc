// The part of Unit that says what ranks must have in common: as a number that
// is compared, and in words for where it differs.
#include <algorithm>
#include <bit>

#include "base/check.h"
#include "shard/unit.h"

namespace lowtide::shard {
namespace {

std::string list_of(const std::vector<std::string>& words) {
  std::string list;
  for (const auto& word : words) {
    list += (list.empty() ? "" : ", ") + word;
  }
  return list;
}

}  // namespace

std::uint64_t Unit::settings_hash() const {
  const auto& reduction = gradients_.reduction();
  std::uint64_t hash = 0;
  for (const bool flag :
       {reshard_after_forward, reshard_after_backward, gradient_sync,
        unshard_in_backward, reduction.sum_only, reduction.all_reduce,
        reduction.divide_factor.has_value(), static_cast<bool>(reduction.hook),
        streams_rows_}) {
    hash = mix(hash, flag ? 1 : 0);
  }
  hash =
      mix(hash,
          std::bit_cast<std::uint64_t>(reduction.divide_factor.value_or(0.0)));
  const auto kept_over = post_forward_group ? post_forward_group->size() : 0;
  hash = mix(hash, static_cast<std::uint64_t>(kept_over));
  for (const auto* prefetches : {&forward_prefetch, &backward_prefetch}) {
    for (const auto& other : *prefetches) {
      const auto unit = other.lock();
      hash = mix(hash, static_cast<std::uint64_t>(unit ? unit->number() : -1));
    }
    hash = mix(hash, prefetches->size());
  }
  return hash;
}

// By the names that fully_shard and the methods of its modules have for them.
std::string Unit::settings_text() const {
  const auto& reduction = gradients_.reduction();
  std::vector<std::string> changed;
  const auto add = [&](bool is_changed, const std::string& text) {
    if (is_changed) changed.push_back(text);
  };
  add(!reshard_after_forward, "reshard_after_forward=False");
  add(post_forward_group != nullptr,
      base::concat("reshard_after_forward=",
                   post_forward_group ? post_forward_group->size() : 0));
  add(!reshard_after_backward, "reshard_after_backward=False");
  add(!gradient_sync, "requires_gradient_sync=False");
  add(!unshard_in_backward, "unshard_in_backward=False");
  add(!reduction.all_reduce, "requires_all_reduce=False");
  add(reduction.sum_only, "force_sum_reduction_for_comms=True");
  add(reduction.divide_factor.has_value(),
      base::concat("gradient_divide_factor=",
                   reduction.divide_factor.value_or(0.0)));
  add(static_cast<bool>(reduction.hook), "an all_reduce_hook");
  add(streams_rows_, "rows that are streamed");
  add(!forward_prefetch.empty(), "modules_to_forward_prefetch");
  add(!backward_prefetch.empty(), "modules_to_backward_prefetch");
  return changed.empty() ? "all as by default" : list_of(changed);
}

std::uint64_t Unit::frozen_hash() const {
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (is_frozen(i)) hash = mix(hash, i);
  }
  return hash;
}

std::string Unit::frozen_text() const {
  std::vector<std::string> frozen;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (is_frozen(i)) {
      frozen.push_back(base::concat("'", infos_[i].name, "'"));
    }
  }
  return frozen.empty() ? "none frozen"
                        : base::concat("frozen: ", list_of(frozen));
}

}  // namespace lowtide::shard
