// Copies between tensors, devices and to Python numbers.
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>

#include <cstring>
#include <optional>

#include "phantom/cuda_kernels/cuda_call.h"
#include "phantom/device/device_clock.h"
#include "phantom/device/host_call.h"
#include "phantom/device/kernels.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

using at::Tensor;

void synchronize_current_stream() {
  phantom_device().memory().synchronize(current_stream());
  if (auto timeline = device_clock().timeline()) {
    timeline->synchronize(current_stream());
  }
}

// What CUDA's copy holds on the device when host and device tensors differ in
// dtype or layout: a blocking copy converts on the host, a non-blocking one on
// the device, and either side is made contiguous.
struct Staging {
  c10::DataPtr converted, contiguous;

  Staging(const Tensor& to, const Tensor& from, bool non_blocking) {
    const bool same_dtype = to.scalar_type() == from.scalar_type();
    const bool from_is_dense =
        from.is_contiguous() && to.sizes() == from.sizes();
    const auto copy_as = [&](const Tensor& other) {
      return temporary(bytes_of(to.numel(), other.scalar_type()));
    };
    if (is_phantom(from)) {
      const bool converts = non_blocking && !same_dtype;
      if (converts) converted = copy_as(to);
      if (!from_is_dense) contiguous = copy_as(converts ? to : from);
    } else if (!to.is_contiguous() || (non_blocking && !same_dtype)) {
      contiguous = copy_as(non_blocking ? from : to);
    }
  }
};

// [Note: Values in meta mode]
// Nothing is computed, so what a program reads back is made up: 1 for numbers,
// False for booleans.  Training loops divide by counts, take logarithms of
// losses and stop when something is not finite; these values let them go on.
void make_up_values(const Tensor& host) {
  constexpr std::size_t kSmall = 65536;  // larger ones stay untouched: no RSS
  if (host.nbytes() > kSmall) return;
  if (host.scalar_type() == at::kBool) {
    host.zero_();
  } else {
    host.fill_(1);
  }
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool transfer = is_phantom(self) != is_phantom(source);
  std::optional<Staging> staging;
  if (transfer) staging.emplace(self, source, non_blocking);
  if (transfer && !phantom_device().exact()) {
    at::expand_inplace(self, source, "copy_");  // throws as copy_ does
    if (!is_phantom(self)) make_up_values(self);
  } else {
    HostCall call;
    call.host(self).copy_(call.host(source));
  }
  if (transfer) {
    time_transfer(is_phantom(self) ? "copy to device" : "copy to host",
                  self.nbytes());
  } else {
    time_kernel("aten::copy_", {self, source});
  }
  if (transfer && !non_blocking) synchronize_current_stream();
  return self;
}

at::Scalar item(const Tensor& self) {
  time_transfer("copy to host", self.nbytes());
  synchronize_current_stream();
  if (phantom_device().exact()) {
    HostCall call;
    return call.host(self).item();
  }
  if (self.scalar_type() == at::kBool) return false;
  if (self.is_floating_point()) return 1.0;
  return std::int64_t{1};
}

}  // namespace

void register_copy_kernels(torch::Library& aten) {
  aten.impl("copy_", &copy_);
  aten.impl("_local_scalar_dense", &item);
}

}  // namespace lowtide::phantom
