// The operators torch casts under torch.autocast("phantom"): CUDA's.
#include <ATen/autocast_mode.h>

#include <optional>

#include "base/check.h"
#include "phantom/device/kernels.h"

// torch's registration macros expect to be used in this namespace.
namespace at::autocast {
namespace {

// As torch does for CUDA: in half precision its gradient overflows.
Tensor refuse_binary_cross_entropy(const Tensor&, const Tensor&,
                                   const std::optional<Tensor>&, int64_t) {
  throw lowtide::Error(lowtide::base::error_text(
      "binary_cross_entropy", "a loss that is safe under autocast",
      "binary_cross_entropy",
      "Use binary_cross_entropy_with_logits, or disable autocast for it."));
}

void register_casts(torch::Library& m) {
#define LOWTIDE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWTIDE_LOWER)
#undef LOWTIDE_LOWER
#define LOWTIDE_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(LOWTIDE_FP32)
#undef LOWTIDE_FP32
#define LOWTIDE_FP32_DTYPE(...) \
  KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(LOWTIDE_FP32_DTYPE)
#undef LOWTIDE_FP32_DTYPE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(
      KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define LOWTIDE_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(LOWTIDE_PROMOTE)
#undef LOWTIDE_PROMOTE
  m.impl("binary_cross_entropy", &refuse_binary_cross_entropy);
}

}  // namespace
}  // namespace at::autocast

namespace lowtide::phantom {

void register_autocast(torch::Library& fallback, torch::Library& aten) {
  fallback.fallback(torch::CppFunction::makeFallthrough());
  at::autocast::register_casts(aten);
}

}  // namespace lowtide::phantom
