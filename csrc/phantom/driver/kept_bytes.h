// Bytes that the host made, where they lie on a device that has no bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "phantom/driver/address_space.h"

namespace lowtide::dry {

// Copies of the host's up to 1 MiB each and 64 MiB together, the oldest given
// up first; they travel with copies between devices.  What a kernel wrote over
// them is not known here: a copy stays until other bytes come to its place.
// Thread-safe.
class KeptBytes {
 public:
  static constexpr std::size_t kMostOfCopy = std::size_t{1} << 20;
  static constexpr std::size_t kMost = std::size_t{64} << 20;

  // `from` is the host's memory.
  void write(Address to, const void* from, std::size_t bytes);
  // Kept where few: what programs clear to count in it.
  void fill(Address to, int value, std::size_t bytes);
  // What is not kept at `from` is not kept at `to` either.
  void copy(Address to, Address from, std::size_t bytes);
  // What is not kept stays what it is at `to`.
  void read(void* to, Address from, std::size_t bytes) const;
  // Whether all of the range is kept.
  bool known(Address first, std::size_t bytes) const;
  // Known, and as it was brought: no copy reaches in from outside.  So memory
  // that was used again for something else is taken for known more rarely.
  bool known_as_whole(Address first, std::size_t bytes) const;
  void forget(Address first, std::size_t bytes);

  std::size_t total() const;

 private:
  struct Copy {
    std::vector<std::uint8_t> bytes;
    std::uint64_t age = 0;
  };
  using Copies = std::map<Address, Copy>;

  Copies::const_iterator first_of(Address address) const;
  void cut(Address first, std::size_t bytes);
  void add(Address to, std::vector<std::uint8_t> bytes);

  mutable std::mutex mutex_;
  Copies copies_;  // never overlap
  std::map<std::uint64_t, Address> by_age_;
  std::uint64_t last_age_ = 0;
  std::size_t total_ = 0;
};

}  // namespace lowtide::dry
