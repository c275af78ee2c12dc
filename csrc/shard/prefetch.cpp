#include "shard/prefetch.h"

#include <utility>

#include "shard/policy.h"

namespace lowtide::shard {

void Prefetch::gather(const Listed& listed, UnitAhead* next) {
  for (const auto& other : listed) {
    if (const auto unit = other.lock()) unit->gather_ahead();
  }
  if (listed.empty() && next != nullptr) {
    next->gather_ahead();
  }
}

void Prefetch::gather_put_off(const Listed& listed) const {
  if (in_forward_ != nullptr) {
    gather(listed, in_forward_);
  }
}

bool Prefetch::waits(const Listed& listed, c10::ArrayRef<std::int64_t> elements,
                     std::int64_t tokens) {
  if (!listed.empty()) {
    in_backward_ = nullptr;
    gather(listed, nullptr);
    return false;
  }
  if (in_backward_ == nullptr || !in_backward_->is_gathered_in_backward()) {
    in_backward_ = nullptr;
    return false;
  }
  gradients_come_ = 0;
  gradients_before_ = gradients_before_gather(
      elements, in_backward_->elements_to_cover(tokens));
  if (gradients_before_ == 0) {
    gather_expected();
  }
  return gradients_before_ > 0;
}

bool Prefetch::on_gradient() {
  ++gradients_come_;
  return in_backward_ != nullptr && gradients_come_ >= gradients_before_;
}

void Prefetch::gather_expected() {
  if (auto* const next = std::exchange(in_backward_, nullptr)) {
    next->gather_ahead();
  }
}

}  // namespace lowtide::shard
