#include "phantom/allocator/settings.h"

#include <bit>
#include <string>

#include "base/check.h"
#include "phantom/allocator/rounding.h"

namespace lowtide::phantom {
namespace {

void require(bool condition, const std::string& setting,
             const std::string& expected, const std::string& got,
             const std::string& next_step) {
  if (condition) return;
  throw InvalidArgument(
      base::error_text("allocator " + setting, expected, got, next_step));
}

std::string bytes(std::size_t value) {
  return base::concat(value, " bytes (", value / kMiB, " MiB)");
}

}  // namespace

void check_settings(const AllocatorSettings& settings) {
  require(settings.large_segment > kMinOwnSegment, "large_segment",
          "more than 10 MiB", bytes(settings.large_segment),
          "Leave it at 20 MiB, or raise it.");
  const std::size_t max_split =
      settings.max_split.value_or(settings.large_segment);
  require(max_split >= settings.large_segment, "max_split",
          "at least large_segment, " + bytes(settings.large_segment),
          bytes(max_split), "Raise it, or leave it out for no limit.");
  const std::size_t rounding =
      settings.max_non_split_rounding.value_or(settings.large_segment);
  require(rounding >= settings.large_segment, "max_non_split_rounding",
          "at least large_segment, " + bytes(settings.large_segment),
          bytes(rounding), "Raise it, or leave it out.");
  for (const std::size_t divisions : settings.roundup_power2_divisions) {
    require(divisions == 0 || std::has_single_bit(divisions),
            "roundup_power2_divisions", "0 or a power of two",
            std::to_string(divisions), "Use 1, 2, 4 or 8, for example.");
  }
  const double threshold = settings.garbage_collection_threshold;
  require(threshold >= 0 && threshold < 1, "garbage_collection_threshold",
          "0 or a value below 1", base::concat(threshold),
          "Give the share of memory above which blocks are given back.");
  require(settings.memory_fraction >= 0 && settings.memory_fraction <= 1,
          "memory_fraction", "a value from 0 to 1",
          base::concat(settings.memory_fraction), "Use 1 for no limit.");
  require(settings.memory_fraction == 1 || settings.capacity, "memory_fraction",
          "1 on a device of unlimited memory",
          base::concat(settings.memory_fraction), "Give a capacity too.");
}

std::optional<std::size_t> allowed_bytes(const AllocatorSettings& settings) {
  if (!settings.capacity || settings.memory_fraction == 1) return std::nullopt;
  return static_cast<std::size_t>(settings.memory_fraction *
                                  static_cast<double>(*settings.capacity));
}

}  // namespace lowtide::phantom
