// The addresses of a device.  Nothing lies there; nobody else is given them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

namespace lowtide::dry {

using Address = std::uintptr_t;

// Between what the heap and what libraries of a 64-bit process take.
inline constexpr Address kFirstAddress = Address{1} << 44;
inline constexpr std::size_t kAddressesOfDevice = std::size_t{4} << 40;
inline constexpr int kMostDevices = 10;
// Variables of kernels (`__constant__`, `__device__`).
inline constexpr Address kFirstSymbol =
    kFirstAddress + kMostDevices * kAddressesOfDevice;
inline constexpr std::size_t kAddressesOfSymbols = std::size_t{1} << 40;

// The device whose address it is; none for the host's.  Symbols are device 0's.
std::optional<int> device_of(Address address);
inline std::optional<int> device_of(const void* pointer) {
  return device_of(reinterpret_cast<Address>(pointer));
}

// Ranges of one device, in steps of 2 MiB, in the order that CUDA's driver
// gives (580.159 on an H200, read off by benchmarks/programs/addresses.py): the
// lowest that fits of what is reserved; where none does, as much as is asked
// for is reserved below all the rest, in steps of 32 MiB, and 512 MiB at first.
// Of free blocks of one size torch's allocator takes the one with the lowest
// address, so what it reserves depends on them.  Not thread-safe.
class AddressSpace {
 public:
  explicit AddressSpace(int device)
      : first_(kFirstAddress +
               static_cast<std::size_t>(device) * kAddressesOfDevice) {}

  // None when no range is that long.
  std::optional<Address> place(std::size_t bytes);
  // The bytes that were placed at `address`; none if nothing was.
  std::optional<std::size_t> forget(Address address);

  struct Range {
    Address first;
    std::size_t bytes;
  };
  // The range that `address` lies in.
  std::optional<Range> around(Address address) const;

 private:
  // The lowest place in what is reserved.
  std::optional<Address> gap_of(std::size_t bytes) const;
  // False when no addresses are left for it.
  bool reserve(std::size_t bytes);

  Address first_;
  std::map<Address, std::size_t> reservations_;  // without gaps, up to the end
  std::map<Address, std::size_t> ranges_;
};

}  // namespace lowtide::dry
