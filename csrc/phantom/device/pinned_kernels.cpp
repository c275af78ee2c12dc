#include "phantom/device/boxed_kernel.h"
#include "phantom/device/kernels.h"

namespace lowtide::phantom {
namespace {

// Torch has a composite for backends it does not know, which takes precedence
// over the boxed kernel.  CUDA runs these in one kernel, or with other
// temporaries.
constexpr const char* kPinned[] = {"_chunk_cat",
                                   "_chunk_cat.out",
                                   "_foreach_max",
                                   "_foreach_norm.Scalar",
                                   "_fused_rms_norm",
                                   "_grouped_mm",
                                   "addr",
                                   "addr.out",
                                   "all.dims",
                                   "all.dims_out",
                                   "any.dims",
                                   "any.dims_out",
                                   "convolution",
                                   "convolution_backward",
                                   "linalg__powsum",
                                   "mish_backward",
                                   "native_group_norm",
                                   "silu_backward",
                                   "silu_backward.grad_input",
                                   "split_with_sizes_copy.out"};

}  // namespace

void register_pinned_kernels(torch::Library& aten) {
  for (const char* name : kPinned) {
    aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed_kernel>());
  }
}

}  // namespace lowtide::phantom
