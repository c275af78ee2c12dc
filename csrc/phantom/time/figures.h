// Machines as lists of numbers, which cross the border of languages.
#pragma once

#include <span>

#include "phantom/time/machine.h"

namespace lowtide::phantom {

// In the order in which lowtide.phantom.machines.flat writes them.  Throws
// std::invalid_argument where there are more or fewer.
Machine machine_of(std::span<const double> figures);

}  // namespace lowtide::phantom
