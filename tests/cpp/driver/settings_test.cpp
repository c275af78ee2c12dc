// What the environment says is what its rule reads, or refused by name: any
// text, and texts that are almost right.
#include "phantom/driver/settings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "phantom/driver/address_space.h"

namespace lowtide::dry {
namespace LOWTIDE_FILE {

using Variables = std::map<std::string, std::string>;

const std::vector<std::string> kNames = {
    "LOWTIDE_DRY_GPU",   "LOWTIDE_DRY_DEVICES", "LOWTIDE_DRY_MEMORY",
    "LOWTIDE_DRY_LIMIT", "LOWTIDE_DRY_EVENTS",  "LOWTIDE_DRY_HANG",
    "LOWTIDE_DRY_PATIENCE"};

Settings read(const Variables& variables) {
  return settings_in([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

// Empty where it was taken.
std::string refusal(const Variables& variables) {
  try {
    read(variables);
    return "";
  } catch (const std::invalid_argument& refused) {
    return refused.what();
  }
}

TEST(SettingsTest, ReadsNumbersAsTheyStandAndNothingElse) {
  EXPECT_EQ(read({{"LOWTIDE_DRY_DEVICES", "3"}}).devices, 3);
  EXPECT_EQ(read({{"LOWTIDE_DRY_DEVICES", ""}}).devices, 1);
  EXPECT_EQ(read({}).patience, std::chrono::seconds(60));
  EXPECT_EQ(read({{"LOWTIDE_DRY_PATIENCE", "2"}}).patience,
            std::chrono::seconds(2));
  // strtoull takes the second for 1, and 2^64 + 1 is none either.
  for (const auto* text : {"-1", "-18446744073709551615", " 1", "+1", "1 ",
                           "0x1", "1e0", "0", "18446744073709551617", "65"}) {
    EXPECT_EQ(refusal({{"LOWTIDE_DRY_DEVICES", text}}),
              "lowtide: LOWTIDE_DRY_DEVICES: expected a number from 1 to " +
                  std::to_string(kMostDevices) + ", got '" + text + "'.");
  }
}

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  // Valid values, with a few characters removed, put in or exchanged.
  Variables next() {
    static const std::vector<std::string> values = {
        "h100",    "rtx4090",   "1",
        "8",       "0",         "85899345920",
        "at_sync", "immediate", "18446744073709551616",
        "-1"};
    Variables variables;
    for (const auto& name : kNames) {
      if (below(2) == 0) continue;
      std::string value = values[below(values.size())];
      for (auto changes = below(3); changes > 0; --changes) change(value);
      // An environment has no value with a zero in it.
      value.erase(std::remove(value.begin(), value.end(), 0), value.end());
      variables[name] = value;
    }
    return variables;
  }

 private:
  std::size_t below(std::size_t end) {
    return std::uniform_int_distribution<std::size_t>(0, end - 1)(random_);
  }
  void change(std::string& value) {
    const auto at = below(value.size() + 1);
    const auto removed = std::min(below(3), value.size() - at);
    value.replace(at, removed, below(3), static_cast<char>(below(256)));
    if (below(20) == 0) value.append(5000, '9');
  }

  std::mt19937 random_;
};

TEST(SettingsTest, AnyTextIsASettingOrRefusedByName) {
  Mutator mutator(7);
  int taken = 0;
  for (int i = 0; i < 20'000; ++i) {
    const auto variables = mutator.next();
    const auto said = refusal(variables);
    if (said.empty()) {
      ++taken;
      const auto settings = read(variables);
      ASSERT_NE(settings.gpu, nullptr);
      ASSERT_TRUE(settings.devices >= 1 && settings.devices <= kMostDevices);
      ASSERT_LE(std::max(settings.memory, settings.limit),
                kAddressesOfDevice / 4);
      continue;
    }
    ASSERT_TRUE(std::any_of(
        kNames.begin(), kNames.end(),
        [&](const auto& name) {
          return variables.count(name) > 0 &&
                 said.find("lowtide: " + name + ": expected ") == 0 &&
                 said.find("got '" + variables.at(name) + "'.") != said.npos;
        }))
        << said;
  }
  EXPECT_GT(taken, 100);
  EXPECT_LT(taken, 19'000);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::dry
