// The simulated device of this process: its options, memory and streams.
//
// One per process, because torch has one PrivateUse1 backend whose allocator,
// guard and hooks are process-wide; they all ask here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>

#include "phantom/allocator/caching_allocator.h"
#include "phantom/device/options.h"
#include "phantom/device/stream_table.h"

namespace lowtide::phantom {

inline constexpr auto kPhantom = c10::DeviceType::PrivateUse1;
inline const c10::Device kPhantomDevice(kPhantom, 0);

inline bool is_phantom(const at::Tensor& tensor) {
  return tensor.device().type() == kPhantom;
}

class PhantomDevice {
 public:
  explicit PhantomDevice(Options options);

  const Options& options() const { return options_; }
  bool exact() const { return options_.mode == Mode::exact; }
  StreamTable& streams() { return streams_; }
  CachingAllocator& memory() { return memory_; }

 private:
  const Options options_;
  StreamTable streams_;
  CachingAllocator memory_;
};

// Throws lowtide::Error before `install_device`.
PhantomDevice& phantom_device();

// The device lives until the process ends: tensors may die after everything
// else.  Throws lowtide::Error if there is one already.
void install_device(Options options);
bool is_installed();

// Throws lowtide::InvalidArgument unless `device` is the one there is.
void require_device(c10::Device device);

}  // namespace lowtide::phantom
