#include "phantom/driver/address_space.h"

#include <iterator>

namespace lowtide::dry {
namespace {

std::size_t in_steps(std::size_t bytes) {
  constexpr std::size_t kStep = std::size_t{2} << 20;
  return (bytes + kStep - 1) / kStep * kStep;
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
  Address address = first_;
  for (const auto& [used, size] : ranges_) {
    if (used - address >= bytes) break;
    address = used + in_steps(size);
  }
  const auto left = first_ + kAddressesOfDevice - address;
  if (bytes > left) return std::nullopt;
  ranges_[address] = bytes;
  return address;
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
