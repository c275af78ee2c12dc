#include "comm/issued_calls.h"

namespace lowtide::comm {

IssuedCalls::IssuedCalls(c10::DeviceType device, std::size_t kept)
    : device_(device), slots_(kept) {}

IssuedCalls::Slot& IssuedCalls::next_slot() {
  Slot& slot = slots_[next_ % slots_.size()];
  if (next_ - first_ == slots_.size()) {
    ++first_;
    overtaken_ = true;
  }
  if (slot.point.use_count() != 1) {
    slot.point = std::make_shared<c10::Event>(device_);
  }
  return slot;
}

std::optional<IssuedCalls::Time> IssuedCalls::oldest() const {
  const std::scoped_lock lock(mutex_);
  if (first_ == next_) return std::nullopt;
  return slot_of(first_).issued;
}

std::optional<IssuedCalls::Unfinished> IssuedCalls::first_unfinished(
    const std::function<bool(const c10::Event&)>& is_done) {
  // A call issued meanwhile waits for one answer, not for all.
  while (true) {
    const std::scoped_lock lock(mutex_);
    if (first_ == next_) return std::nullopt;
    const Slot& slot = slot_of(first_);
    if (!is_done(*slot.point)) {
      return Unfinished{
          slot.kind,   slot.label, slot.bytes,
          slot.issued, first_,     static_cast<std::size_t>(next_ - first_ - 1),
          overtaken_};
    }
    ++first_;
    overtaken_ = false;
  }
}

}  // namespace lowtide::comm
