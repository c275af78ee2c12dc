#include "shard/unit_settings.h"

#include <bit>

#include "base/check.h"
#include "shard/step_log.h"

namespace lowtide::shard {

std::uint64_t UnitSettings::hash() const {
  std::uint64_t hash = 0;
  for (const bool flag :
       {reshard_after_forward, reshard_after_backward, gradient_sync,
        unshard_in_backward, reduction.sum_only, reduction.all_reduce,
        reduction.unused_too, reduction.divide_factor.has_value(),
        static_cast<bool>(reduction.hook)}) {
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

std::string UnitSettings::text() const {
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
  add(reduction.unused_too, "reduce_scatter_unused_params=True");
  add(reduction.divide_factor.has_value(),
      base::concat("gradient_divide_factor=",
                   reduction.divide_factor.value_or(0.0)));
  add(static_cast<bool>(reduction.hook), "an all_reduce_hook");
  add(!forward_prefetch.empty(), "modules_to_forward_prefetch");
  add(!backward_prefetch.empty(), "modules_to_backward_prefetch");
  return changed.empty() ? "all as by default" : base::listed(changed);
}

}  // namespace lowtide::shard
