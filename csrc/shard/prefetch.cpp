#include "shard/prefetch.h"

#include <algorithm>
#include <utility>

#include "shard/policy.h"

namespace lowtide::shard {

void Prefetch::gather(const Listed& listed, const Next& next) {
  for (const auto& other : listed) {
    if (const auto unit = other.lock()) unit->gather_ahead();
  }
  if (listed.empty()) {
    for (auto* const unit : next) unit->gather_ahead();
  }
}

void Prefetch::gather_put_off(const Listed& listed) const {
  if (!in_forward_.empty()) {
    gather(listed, in_forward_);
  }
}

bool Prefetch::waits(const Listed& listed, c10::ArrayRef<std::int64_t> elements,
                     std::int64_t tokens) {
  if (!listed.empty()) {
    in_backward_.clear();
    gather(listed, {});
    return false;
  }
  std::erase_if(in_backward_, [](const auto* unit) {
    return !unit->is_gathered_in_backward();
  });
  if (in_backward_.empty()) {
    return false;
  }
  gradients_come_ = 0;
  std::int64_t cover = 0;
  for (const auto* unit : in_backward_) {
    const auto more = unit->elements_to_cover(tokens);
    cover = std::min(cover, kNothingCovers - more) + more;
  }
  gradients_before_ = gradients_before_gather(elements, cover);
  if (gradients_before_ == 0) {
    gather_expected();
  }
  return gradients_before_ > 0;
}

bool Prefetch::on_gradient() {
  ++gradients_come_;
  return !in_backward_.empty() && gradients_come_ >= gradients_before_;
}

void Prefetch::gather_expected() {
  gather({}, std::exchange(in_backward_, {}));
}

}  // namespace lowtide::shard
