#include "ops/clipping.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <string>

#include "base/check.h"
#ifdef LOWTIDE_WITH_CUDA
#include "ops/cuda/clipping.h"
#endif

namespace lowtide::ops {
namespace {

void require_kernel_types(const std::string& who, at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    const auto dtype = tensor.scalar_type();
    if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) {
      throw InvalidArgument(base::error_text(
          who, "tensors of float32, bfloat16 or float16",
          base::concat(c10::toString(dtype)),
          "Use torch.nn.utils.clip_grad_norm_ for other dtypes."));
    }
    if (tensor.device() != tensors[0].device()) {
      throw InvalidArgument(base::error_text(
          who, base::concat("tensors of one device, ", tensors[0].device()),
          base::concat(tensor.device()), "Call it once for each device."));
    }
  }
}

}  // namespace

void require_norm_arguments(at::TensorList tensors) {
  const std::string who = "torch.ops.lowtide.foreach_l2_norm";
  if (tensors.empty()) {
    throw InvalidArgument(
        base::error_text(who, "one tensor at least", "none",
                         "Without gradients there is nothing to clip."));
  }
  require_kernel_types(who, tensors);
}

void require_scale_arguments(at::TensorList tensors, const at::Tensor& factor) {
  const std::string who = "torch.ops.lowtide.foreach_scale_";
  require_kernel_types(who, tensors);
  if (factor.dim() != 0) {
    throw InvalidArgument(base::error_text(
        who, "a factor without dimensions",
        base::concat("one of ", factor.sym_sizes()), "Pass one number."));
  }
}

at::Tensor foreach_l2_norm(at::TensorList tensors) {
  require_norm_arguments(tensors);
#ifdef LOWTIDE_WITH_CUDA
  if (tensors[0].is_cuda()) return cuda::foreach_l2_norm(tensors);
#endif
  return at::linalg_vector_norm(
      at::stack(at::_foreach_norm(tensors, 2.0, at::kFloat)), 2.0);
}

void foreach_scale(at::TensorList tensors, const at::Tensor& factor) {
  require_scale_arguments(tensors, factor);
  if (tensors.empty()) return;
#ifdef LOWTIDE_WITH_CUDA
  if (tensors[0].is_cuda()) return cuda::foreach_scale(tensors, factor);
#endif
  for (const auto& tensor : tensors) {
    tensor.mul_(factor);
  }
}

}  // namespace lowtide::ops
