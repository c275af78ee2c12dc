#include "phantom/time/costs.h"

#include <algorithm>
#include <cstddef>

namespace lowtide::phantom {

KernelCost kernel_cost(const Work& work, const Accelerator& accelerator) {
  const double peak =
      accelerator.peak_flops[static_cast<std::size_t>(work.rate)] *
      (work.is_attention ? accelerator.attention_efficiency
                         : accelerator.product_efficiency);
  const double bandwidth =
      accelerator.memory_bandwidth * accelerator.memory_efficiency;
  return {work.flops > 0 ? work.flops / peak : 0,
          work.bytes > 0 ? work.bytes / bandwidth : 0,
          accelerator.kernel_floor};
}

double kernel_seconds(const Work& work, const Accelerator& accelerator) {
  const KernelCost cost = kernel_cost(work, accelerator);
  return std::max({cost.computing, cost.moving, cost.floor});
}

}  // namespace lowtide::phantom
