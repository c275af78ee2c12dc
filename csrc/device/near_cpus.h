// The CPUs that are near a GPU.
//
// [Note: Page-locked memory near the GPU]
// NVIDIA's driver takes the pages of cudaHostAlloc from the NUMA node of the
// CPU that asks, from a pool of its own ahead of the kernel's
// (nv_alloc_system_pages in its open source), so a thread's memory policy alone
// would not do, and containers may not set one.  It falls back to other nodes
// where that one has none left.
#pragma once

#include <sched.h>

#include <optional>
#include <string>

namespace lowtide::device {

// Those in `sysfs`/bus/pci/devices/`address`/local_cpulist; `address` as CUDA
// writes it, 0000:3B:00.0.  None where the system does not say.
std::optional<cpu_set_t> cpus_near(std::string address,
                                   const std::string& sysfs);

// While it lives, this thread runs on `cpus`, as far as it may: on none but
// those that it may run on already, and on all of these where none of `cpus` is
// among them or the system refuses.
class OnCpus {
 public:
  explicit OnCpus(const std::optional<cpu_set_t>& cpus);
  ~OnCpus();
  OnCpus(const OnCpus&) = delete;
  OnCpus& operator=(const OnCpus&) = delete;

 private:
  std::optional<cpu_set_t> before_;
};

}  // namespace lowtide::device
