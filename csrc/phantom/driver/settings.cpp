#include "phantom/driver/settings.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "phantom/driver/address_space.h"

namespace lowtide::dry {
namespace {

constexpr int kUsage = 2;  // exit status of a command that was called wrongly

[[noreturn]] void refuse(const char* variable, const std::string& rule,
                         const std::string& value) {
  throw std::invalid_argument(std::string("lowtide: ") + variable +
                              ": expected " + rule + ", got '" + value + "'.");
}

std::string value_of(Environment environment, const char* variable,
                     const char* otherwise) {
  const char* value = environment(variable);
  return value != nullptr && *value != 0 ? value : otherwise;
}

std::size_t number_of(Environment environment, const char* variable,
                      std::size_t least, std::size_t most,
                      std::size_t otherwise) {
  const auto text =
      value_of(environment, variable, std::to_string(otherwise).c_str());
  std::size_t number = 0;
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, number);
  if (read.ec != std::errc() || read.ptr != end || number < least ||
      number > most) {
    refuse(variable,
           "a number from " + std::to_string(least) + " to " +
               std::to_string(most),
           text);
  }
  return number;
}

Settings read() {
  try {
    return settings_in([](const char* variable) -> const char* {
      return std::getenv(variable);
    });
  } catch (const std::invalid_argument& refused) {
    std::fprintf(stderr, "%s\n", refused.what());
    std::_Exit(kUsage);
  }
}

}  // namespace

Settings settings_in(Environment environment) {
  Settings settings;
  const auto key = value_of(environment, "LOWTIDE_DRY_GPU", "h100");
  settings.gpu = gpu_named(key);
  if (settings.gpu == nullptr) {
    refuse("LOWTIDE_DRY_GPU", "one of " + std::string(gpu_names()), key);
  }
  settings.devices = static_cast<int>(
      number_of(environment, "LOWTIDE_DRY_DEVICES", 1, kMostDevices, 1));
  settings.memory = number_of(environment, "LOWTIDE_DRY_MEMORY", 0,
                              kAddressesOfDevice / 4, settings.gpu->memory());
  settings.limit = number_of(environment, "LOWTIDE_DRY_LIMIT", 0,
                             kAddressesOfDevice / 4, settings.memory);
  const auto events = value_of(environment, "LOWTIDE_DRY_EVENTS", "immediate");
  settings.immediate = events == "immediate";
  if (!settings.immediate && events != "at_sync") {
    refuse("LOWTIDE_DRY_EVENTS", "immediate or at_sync", events);
  }
  settings.hang =
      number_of(environment, "LOWTIDE_DRY_HANG", 0, std::size_t{1} << 40, 0);
  settings.patience = std::chrono::seconds(
      number_of(environment, "LOWTIDE_DRY_PATIENCE", 1, 1 << 20, 60));
  return settings;
}

const Settings& settings() {
  static const Settings settings = read();
  return settings;
}

}  // namespace lowtide::dry
