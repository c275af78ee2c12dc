#include "phantom/allocator/segments.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <map>

#include "base/check.h"
#include "phantom/allocator/rounding.h"

namespace lowtide::phantom {
namespace {

// Free ranges of [first, first + span), handed out lowest first in multiples
// of the driver's granularity.
class AddressRange {
 public:
  AddressRange(Address first, std::size_t span) { free_[first] = span; }

  Address take(std::size_t bytes) {
    const std::size_t size = round_up(bytes, kGranularity);
    for (auto [address, room] : free_) {
      if (room < size) continue;
      free_.erase(address);
      if (room > size) free_[address + size] = room - size;
      return address;
    }
    throw Error(base::error_text(
        "phantom address range", base::concat("a gap of ", size, " bytes"),
        "none left", "Use fewer streams, or set a device capacity."));
  }

  void give(Address address, std::size_t bytes) {
    std::size_t size = round_up(bytes, kGranularity);
    auto next = free_.lower_bound(address);
    if (next != free_.end() && next->first == address + size) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == address) {
        before->second += size;
        return;
      }
    }
    free_.emplace(address, size);
  }

 private:
  static constexpr std::size_t kGranularity = 2 * kMiB;
  std::map<Address, std::size_t> free_;
};

class NumberedSegments : public SegmentProvider {
 public:
  NumberedSegments(Address first, std::size_t span) : range_(first, span) {}

  Address allocate(std::size_t bytes) override { return range_.take(bytes); }
  void release(Address address, std::size_t bytes) override {
    range_.give(address, bytes);
  }
  Address reserve(std::size_t bytes) override { return range_.take(bytes); }
  void unreserve(Address address, std::size_t bytes) override {
    range_.give(address, bytes);
  }
  void map(Address, std::size_t) override {}
  void unmap(Address, std::size_t) override {}

 private:
  AddressRange range_;
};

[[noreturn]] void throw_system_error(const std::string& what,
                                     std::size_t bytes) {
  throw Error(base::error_text(
      "phantom segments", base::concat(what, " of ", bytes, " bytes"),
      std::strerror(errno), "Raise the limits `ulimit -v` and memory."));
}

// An address range of the process that nothing else uses; inaccessible.
class Reservation {
 public:
  explicit Reservation(std::size_t span) : span_(span) {
    // Alignment as a device's, so that addresses differ by a constant only.
    void* start = mmap(nullptr, span, PROT_NONE, kFlags, -1, 0);
    if (start == MAP_FAILED) throw_system_error("a reservation", span);
    start_ = reinterpret_cast<Address>(start);
  }
  ~Reservation() { munmap(reinterpret_cast<void*>(start_), span_); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  Address first() const { return round_up(start_, 2 * kMiB); }
  std::size_t usable() const { return span_ - (first() - start_); }

  void give_bytes(Address address, std::size_t bytes) const {
    replace(address, bytes, PROT_READ | PROT_WRITE);
  }
  void take_bytes(Address address, std::size_t bytes) const {
    replace(address, bytes, PROT_NONE);
  }

 private:
  static constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

  static void replace(Address address, std::size_t bytes, int protection) {
    if (mmap(reinterpret_cast<void*>(address), bytes, protection,
             kFlags | MAP_FIXED, -1, 0) == MAP_FAILED) {
      throw_system_error("a mapping", bytes);
    }
  }

  std::size_t span_;
  Address start_ = 0;
};

class FaultingSegments : private Reservation, public NumberedSegments {
 public:
  explicit FaultingSegments(std::size_t span)
      : Reservation(span), NumberedSegments(first(), usable()) {}
};

class HostSegments final : private Reservation, public NumberedSegments {
 public:
  explicit HostSegments(std::size_t span)
      : Reservation(span), NumberedSegments(first(), usable()) {}

  Address allocate(std::size_t bytes) override {
    const Address address = NumberedSegments::allocate(bytes);
    give_bytes(address, bytes);
    return address;
  }
  void release(Address address, std::size_t bytes) override {
    take_bytes(address, bytes);
    NumberedSegments::release(address, bytes);
  }
  void map(Address address, std::size_t bytes) override {
    give_bytes(address, bytes);
  }
  void unmap(Address address, std::size_t bytes) override {
    take_bytes(address, bytes);
  }
};

}  // namespace

std::unique_ptr<SegmentProvider> numbered_segments() {
  return std::make_unique<NumberedSegments>(Address{1} << 44,
                                            std::size_t{1} << 62);
}

std::unique_ptr<SegmentProvider> faulting_segments(std::size_t span) {
  return std::make_unique<FaultingSegments>(span);
}

std::unique_ptr<SegmentProvider> host_segments(std::size_t span) {
  return std::make_unique<HostSegments>(span);
}

}  // namespace lowtide::phantom
