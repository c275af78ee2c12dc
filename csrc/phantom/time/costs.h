// How long a kernel takes: a roofline.
#pragma once

#include "phantom/time/collectives.h"
#include "phantom/time/machine.h"

namespace lowtide::phantom {

// What one kernel does.
struct Work {
  double flops = 0;  // a multiplication and an addition are two
  double bytes = 0;  // read and written, once each
  Rate rate = Rate::fp32;
  bool is_attention = false;
};

// Seconds alone on the device, by what takes them.
struct KernelCost {
  double computing = 0;
  double moving = 0;
  double floor = 0;
};
KernelCost kernel_cost(const Work& work, const Accelerator& accelerator);
// The longest of them.
double kernel_seconds(const Work& work, const Accelerator& accelerator);

}  // namespace lowtide::phantom
