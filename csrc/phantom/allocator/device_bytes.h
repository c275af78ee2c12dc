// How much memory the device has left.
#pragma once

#include <cstddef>
#include <optional>

namespace lowtide::phantom {

class DeviceBytes {
 public:
  explicit DeviceBytes(std::optional<std::size_t> capacity)
      : capacity_(capacity) {}

  bool take(std::size_t bytes) {  // false: not enough, nothing taken
    if (capacity_ && bytes > *capacity_ - taken_) return false;
    taken_ += bytes;
    return true;
  }
  void give(std::size_t bytes) { taken_ -= bytes; }

  std::size_t taken() const { return taken_; }

 private:
  std::optional<std::size_t> capacity_;
  std::size_t taken_ = 0;
};

}  // namespace lowtide::phantom
