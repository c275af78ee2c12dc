// Copies between tensors, devices and to Python numbers.
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>

#include <cstring>

#include "phantom/device/host_call.h"
#include "phantom/device/kernels.h"
#include "phantom/device/phantom_device.h"
#include "phantom/device/scratch.h"

namespace lowtide::phantom {
namespace {

using at::Tensor;

bool is_phantom(const Tensor& tensor) {
  return tensor.device().type() == kPhantom;
}

void synchronize_current_stream() {
  phantom_device().memory().synchronize(current_stream());
}

std::size_t bytes_as(const Tensor& shape, const Tensor& dtype) {
  return static_cast<std::size_t>(shape.numel()) * dtype.itemsize();
}

// What CUDA's copy holds on the device when host and device tensors differ in
// dtype or layout: a blocking copy converts on the host, a non-blocking one on
// the device, and either side is made contiguous first.
void transfer_scratch(const Tensor& to, const Tensor& from, bool non_blocking,
                      Scratch& scratch) {
  const bool same_dtype = to.scalar_type() == from.scalar_type();
  const bool same_layout =
      to.sizes() == from.sizes() && to.is_contiguous() && from.is_contiguous();
  if (same_dtype && same_layout) return;
  if (is_phantom(from)) {
    if (non_blocking && !same_dtype) {
      scratch.take(bytes_as(to, to));
    } else if (!from.is_contiguous() || to.sizes() != from.sizes()) {
      scratch.take(bytes_as(to, from));
    }
  } else if (non_blocking ? !(to.is_contiguous() && same_dtype)
                          : !to.is_contiguous()) {
    scratch.take(bytes_as(to, non_blocking ? from : to));
  }
}

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
  Scratch scratch;
  if (transfer) transfer_scratch(self, source, non_blocking, scratch);
  if (transfer && !phantom_device().exact()) {
    at::expand_inplace(self, source, "copy_");  // throws as copy_ does
    if (!is_phantom(self)) make_up_values(self);
  } else {
    HostCall call;
    call.host(self).copy_(call.host(source));
  }
  if (transfer && !non_blocking) synchronize_current_stream();
  return self;
}

at::Scalar item(const Tensor& self) {
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
