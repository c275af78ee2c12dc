#include "device/near_cpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "device/fake_sysfs.h"

namespace lowtide::device {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<int> numbers(const cpu_set_t& cpus) {
  std::vector<int> all;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &cpus)) all.push_back(cpu);
  }
  return all;
}

std::vector<int> of_thread() {
  cpu_set_t cpus;
  EXPECT_EQ(sched_getaffinity(0, sizeof(cpus), &cpus), 0);
  return numbers(cpus);
}

std::optional<cpu_set_t> only(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  return cpus;
}

class NearCpusTest : public testing::Test {
 protected:
  // Of a device whose file has this text; none: nothing is known of it.
  std::vector<int> near(const std::string& text) {
    sysfs_.write_cpus(text);
    const auto cpus = cpus_near("0000:3B:00.0", sysfs_.root());
    return cpus ? numbers(*cpus) : std::vector<int>();
  }

  const FakeSysfs sysfs_{"0000:3b:00.0"};
};

TEST_F(NearCpusTest, TheSystemSaysWhichAreNear) {
  EXPECT_THAT(near("0\n"), ElementsAre(0));
  EXPECT_THAT(near("0-2,8\n"), ElementsAre(0, 1, 2, 8));
  EXPECT_THAT(near("28-29,84-85\n"), ElementsAre(28, 29, 84, 85));
}

TEST_F(NearCpusTest, NothingIsKnownOfOtherTextsAndDevices) {
  for (const auto* text : {"", "\n", "all\n", "0-\n", "3-1\n", "0-99999\n",
                           "0,-5\n", "0 and 1\n", "99999999999999\n"}) {
    EXPECT_THAT(near(text), IsEmpty()) << text;
  }
  EXPECT_FALSE(cpus_near("0000:3C:00.0", sysfs_.root()).has_value());
  EXPECT_FALSE(cpus_near("", sysfs_.root()).has_value());
}

TEST_F(NearCpusTest, TheThreadIsThereForAsLongAsItSays) {
  const auto before = of_thread();
  {
    const OnCpus near(only(before.back()));
    EXPECT_THAT(of_thread(), ElementsAre(before.back()));
    EXPECT_EQ(sched_getcpu(), before.back());
  }
  EXPECT_EQ(of_thread(), before);
}

// The ranks of a machine are often bound to CPUs of their own.
TEST_F(NearCpusTest, TheThreadStaysOnThoseItMayRunOn) {
  const auto before = of_thread();
  {
    const OnCpus bound(only(before.front()));
    const OnCpus near(only(CPU_SETSIZE - 1));
    EXPECT_THAT(of_thread(), ElementsAre(before.front()));
  }
  const OnCpus nowhere(std::nullopt);
  EXPECT_EQ(of_thread(), before);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::device
