#include "phantom/allocator/out_of_memory.h"

#include <iomanip>
#include <sstream>

namespace lowtide::phantom {
namespace {

std::string readable(std::size_t bytes) {
  constexpr double kKiB = 1024;
  const auto value = static_cast<double>(bytes);
  std::ostringstream out;
  out << std::fixed << std::setprecision(2);
  if (value < kKiB) {
    out << bytes << " bytes";
  } else if (value < kKiB * kKiB) {
    out << value / kKiB << " KiB";
  } else if (value < kKiB * kKiB * kKiB) {
    out << value / (kKiB * kKiB) << " MiB";
  } else {
    out << value / (kKiB * kKiB * kKiB) << " GiB";
  }
  return out.str();
}

std::string message(const OutOfMemoryFacts& facts) {
  return base::error_text(
      "phantom device memory",
      "room for " + readable(facts.requested) + " (" + readable(facts.needed) +
          " reserved)",
      readable(facts.limit) + " of which " + readable(facts.reserved) +
          " are reserved and " + readable(facts.allocated) + " allocated",
      "Run on a larger device, free tensors before this allocation, or if much "
      "is reserved but not allocated, use expandable segments.");
}

}  // namespace

OutOfMemory::OutOfMemory(const OutOfMemoryFacts& facts)
    : Error(message(facts)), facts_(facts) {}

}  // namespace lowtide::phantom
