#include "shard/group_forward.h"

#include <algorithm>

namespace lowtide::shard {

bool GroupForward::begins_with(std::size_t module, bool alone) const {
  return !under_way() || (alone && modules_[module].inside);
}

void GroupForward::enter(std::size_t module, bool begins) {
  if (begins) end();
  under_way_ = true;
  modules_[module].inside = true;
  modules_[module].began = begins;
}

bool GroupForward::leave(std::size_t module, bool alone) {
  modules_[module].inside = false;
  modules_[module].ran = true;
  const bool all_ran = std::all_of(modules_.begin(), modules_.end(),
                                   [](const auto& one) { return one.ran; });
  const bool over = (alone || all_ran) && nobody_inside();
  modules_[module].ended = over;
  if (over) end();
  return over;
}

void GroupForward::end() {
  for (auto& module : modules_) {
    module.ran = module.inside = false;
  }
  under_way_ = false;
}

bool GroupForward::nobody_inside() const {
  return std::none_of(modules_.begin(), modules_.end(),
                      [](const auto& one) { return one.inside; });
}

}  // namespace lowtide::shard
