#include "shard/unit_settings.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "testing/recording_collectives.h"
#include "testing/scripted_runtime.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

struct Change {
  std::function<void(UnitSettings& settings)> make;
  std::string text;
};

std::vector<Change> changes() {
  return {
      {[](auto& s) { s.reshard_after_forward = false; },
       "reshard_after_forward=False"},
      {[](auto& s) { s.reshard_after_backward = false; },
       "reshard_after_backward=False"},
      {[](auto& s) { s.gradient_sync = false; },
       "requires_gradient_sync=False"},
      {[](auto& s) { s.unshard_in_backward = false; },
       "unshard_in_backward=False"},
      {[](auto& s) { s.reduction.all_reduce = false; },
       "requires_all_reduce=False"},
      {[](auto& s) { s.reduction.sum_only = true; },
       "force_sum_reduction_for_comms=True"},
      {[](auto& s) { s.reduction.unused_too = true; },
       "reduce_scatter_unused_params=True"},
      {[](auto& s) { s.reduction.divide_factor = 3.0; },
       "gradient_divide_factor=3"},
      {[](auto& s) { s.reduction.divide_factor = 5.0; },
       "gradient_divide_factor=5"},
      {[](auto& s) { s.reduction.hook = [](const at::Tensor&) {}; },
       "an all_reduce_hook"},
      {[](auto& s) { s.forward_prefetch.emplace_back(); },
       "modules_to_forward_prefetch"},
      {[](auto& s) { s.backward_prefetch.emplace_back(); },
       "modules_to_backward_prefetch"},
      {[](auto& s) {
         s.post_forward_group = std::make_shared<comm::RecordingCollectives>(
             0, 2, std::make_shared<device::ScriptedRuntime>());
       },
       "reshard_after_forward=2"},
  };
}

// Two ranks that differ in one of them must be told apart, and told how.
TEST(UnitSettingsTest, EveryChangeHasAHashAndATextOfItsOwn) {
  std::set<std::uint64_t> hashes = {UnitSettings().hash()};
  EXPECT_EQ(UnitSettings().text(), "all as by default");
  for (const auto& change : changes()) {
    UnitSettings settings;
    change.make(settings);
    EXPECT_TRUE(hashes.insert(settings.hash()).second) << change.text;
    EXPECT_EQ(settings.text(), change.text);
  }
}

TEST(UnitSettingsTest, WhatIsKnownOfModulesIsNoSetting) {
  UnitSettings settings;
  settings.encloses_units = settings.leaf_module = true;
  EXPECT_EQ(settings.hash(), UnitSettings().hash());
}

TEST(UnitSettingsTest, SeveralChangesAreListed) {
  UnitSettings settings;
  settings.gradient_sync = settings.reshard_after_backward = false;
  EXPECT_EQ(settings.text(),
            "reshard_after_backward=False, requires_gradient_sync=False");
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
