#include "device/near_cpus.h"

#include <algorithm>
#include <cctype>
#include <fstream>

namespace lowtide::device {

std::optional<cpu_set_t> cpus_near(std::string address,
                                   const std::string& sysfs) {
  // The kernel writes them in lower case.
  std::transform(address.begin(), address.end(), address.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  std::ifstream file(sysfs + "/bus/pci/devices/" + address + "/local_cpulist");
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  int first = 0;
  while (file >> first) {  // "0-3,8"
    int last = first;
    if (file.peek() == '-' && !(file.ignore() >> last)) return std::nullopt;
    if (first < 0 || last < first || last >= CPU_SETSIZE) return std::nullopt;
    for (int cpu = first; cpu <= last; ++cpu) CPU_SET(cpu, &cpus);
    if (file.peek() == ',') file.ignore();
  }
  if (!file.eof() || CPU_COUNT(&cpus) == 0) return std::nullopt;
  return cpus;
}

OnCpus::OnCpus(const std::optional<cpu_set_t>& cpus) {
  cpu_set_t before;
  if (!cpus || sched_getaffinity(0, sizeof(before), &before) != 0) return;
  cpu_set_t both;
  CPU_AND(&both, &before, &*cpus);
  if (CPU_COUNT(&both) == 0 || CPU_EQUAL(&both, &before)) return;
  if (sched_setaffinity(0, sizeof(both), &both) == 0) before_ = before;
}

OnCpus::~OnCpus() {
  if (before_) sched_setaffinity(0, sizeof(*before_), &*before_);
}

}  // namespace lowtide::device
