#include "phantom/driver/settings.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "phantom/driver/address_space.h"

namespace lowtide::dry {
namespace {

constexpr int kUsage = 2;  // exit status of a command that was called wrongly

[[noreturn]] void refuse(const char* variable, const std::string& rule,
                         const std::string& value) {
  std::fprintf(stderr, "lowtide: %s: expected %s, got '%s'.\n", variable,
               rule.c_str(), value.c_str());
  std::_Exit(kUsage);
}

std::string value_of(const char* variable, const char* otherwise) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != 0 ? value : otherwise;
}

std::size_t number_of(const char* variable, std::size_t least, std::size_t most,
                      std::size_t otherwise) {
  const auto text = value_of(variable, std::to_string(otherwise).c_str());
  char* end = nullptr;
  const auto number = std::strtoull(text.c_str(), &end, 10);
  if (*end != 0 || number < least || number > most) {
    refuse(variable,
           "a number from " + std::to_string(least) + " to " +
               std::to_string(most),
           text);
  }
  return number;
}

Settings read() {
  Settings settings;
  const auto key = value_of("LOWTIDE_DRY_GPU", "h100");
  settings.gpu = gpu_named(key);
  if (settings.gpu == nullptr) {
    refuse("LOWTIDE_DRY_GPU", "one of " + std::string(gpu_names()), key);
  }
  settings.devices =
      static_cast<int>(number_of("LOWTIDE_DRY_DEVICES", 1, kMostDevices, 1));
  settings.memory = number_of("LOWTIDE_DRY_MEMORY", 0, kAddressesOfDevice / 4,
                              settings.gpu->memory());
  settings.limit = number_of("LOWTIDE_DRY_LIMIT", 0, kAddressesOfDevice / 4,
                             settings.memory);
  const auto events = value_of("LOWTIDE_DRY_EVENTS", "immediate");
  settings.immediate = events == "immediate";
  if (!settings.immediate && events != "at_sync") {
    refuse("LOWTIDE_DRY_EVENTS", "immediate or at_sync", events);
  }
  return settings;
}

}  // namespace

const Settings& settings() {
  static const Settings settings = read();
  return settings;
}

}  // namespace lowtide::dry
