// What the environment says of the machine that the dry driver stands for.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "phantom/driver/gpus.h"

namespace lowtide::dry {

//   LOWTIDE_DRY_GPU      a name of gpus.h; default h100
//   LOWTIDE_DRY_DEVICES  how many; default 1
//   LOWTIDE_DRY_MEMORY   bytes of each; default the GPU's
//   LOWTIDE_DRY_LIMIT    bytes of each that there really are; default as many
//   LOWTIDE_DRY_EVENTS   immediate (default): events are complete when they are
//                        recorded; at_sync: when the host waits
//   LOWTIDE_DRY_HANG     which of the process's collectives, counted from 1,
//                        never finishes, nor what comes after it; default none
//   LOWTIDE_DRY_PATIENCE seconds of the wall's clock after which a thread that
//                        gives the device no work sees as done what does not
//                        hang; default 60
struct Settings {
  const Gpu* gpu = nullptr;
  int devices = 1;
  std::size_t memory = 0;
  std::size_t limit = 0;
  bool immediate = true;
  std::uint64_t hang = 0;
  std::chrono::seconds patience = std::chrono::seconds(60);
};

// As getenv.
using Environment = const std::function<const char*(const char*)>&;

// Throws std::invalid_argument, with the rule, for a value that is not valid.
Settings settings_in(Environment environment);

// The process's, read once.  A value that is not valid ends the process with a
// message.
const Settings& settings();

}  // namespace lowtide::dry
