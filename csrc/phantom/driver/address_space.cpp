#include "phantom/driver/address_space.h"

#include <algorithm>
#include <iterator>

namespace lowtide::dry {
namespace {

constexpr std::size_t kStep = std::size_t{2} << 20;
constexpr std::size_t kReservedStep = std::size_t{32} << 20;
constexpr std::size_t kReservedFirst = std::size_t{512} << 20;

std::size_t in_steps(std::size_t bytes, std::size_t step = kStep) {
  return (bytes + step - 1) / step * step;
}

}  // namespace

std::optional<int> device_of(Address address) {
  if (address < kFirstAddress ||
      address >= kFirstSymbol + kAddressesOfSymbols) {
    return std::nullopt;
  }
  if (address >= kFirstSymbol) return 0;
  return static_cast<int>((address - kFirstAddress) / kAddressesOfDevice);
}

std::optional<Address> AddressSpace::place(std::size_t bytes) {
  auto address = gap_of(bytes);
  if (!address && reserve(bytes)) address = gap_of(bytes);
  if (address) ranges_[*address] = bytes;
  return address;
}

std::optional<Address> AddressSpace::gap_of(std::size_t bytes) const {
  for (const auto& [first, reserved] : reservations_) {
    Address address = first;
    const auto until = ranges_.lower_bound(first + reserved);
    for (auto used = ranges_.lower_bound(first); used != until; ++used) {
      if (used->first - address >= bytes) return address;
      address = used->first + in_steps(used->second);
    }
    if (first + reserved - address >= bytes) return address;
  }
  return std::nullopt;
}

bool AddressSpace::reserve(std::size_t bytes) {
  const auto end = reservations_.empty() ? first_ + kAddressesOfDevice
                                         : reservations_.begin()->first;
  const auto left = end - first_;
  if (bytes > left) return false;
  const auto least = reservations_.empty() ? kReservedFirst : kReservedStep;
  const auto reserved =
      std::min(left, std::max(least, in_steps(bytes, kReservedStep)));
  reservations_.emplace(end - reserved, reserved);
  return true;
}

std::optional<std::size_t> AddressSpace::forget(Address address) {
  const auto found = ranges_.find(address);
  if (found == ranges_.end()) return std::nullopt;
  const auto bytes = found->second;
  ranges_.erase(found);
  return bytes;
}

std::optional<AddressSpace::Range> AddressSpace::around(Address address) const {
  auto found = ranges_.upper_bound(address);
  if (found == ranges_.begin()) return std::nullopt;
  --found;
  if (address >= found->first + found->second) return std::nullopt;
  return Range{found->first, found->second};
}

}  // namespace lowtide::dry
