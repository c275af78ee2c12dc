#include "phantom/device/host_autograd.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

namespace lowtide::phantom {
namespace {

// Kernels run below autograd; a user's program starts above it.
class UserScope {
  c10::impl::ForceDispatchKeyGuard keys_{c10::default_included_set,
                                         c10::default_excluded_set};
  at::AutoGradMode grad_mode_{true};
};

std::vector<at::Tensor> leaves(const std::vector<at::Tensor>& inputs,
                               const std::vector<bool>& tracked) {
  std::vector<at::Tensor> leaves;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    leaves.push_back(inputs[i].defined()
                         ? inputs[i].detach().requires_grad_(tracked[i])
                         : inputs[i]);
  }
  return leaves;
}

}  // namespace

at::Tensor host_forward(const HostFunction& function,
                        const std::vector<at::Tensor>& inputs,
                        const std::vector<bool>& tracked) {
  const UserScope scope;
  return function(leaves(inputs, tracked)).detach();
}

std::vector<at::Tensor> host_backward(const HostFunction& function,
                                      const std::vector<at::Tensor>& inputs,
                                      const std::vector<bool>& tracked,
                                      const at::Tensor& gradient) {
  const UserScope scope;
  const auto all = leaves(inputs, tracked);
  std::vector<at::Tensor> wanted;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (tracked[i]) wanted.push_back(all[i]);
  }
  auto found = torch::autograd::grad({function(all)}, wanted, {gradient});
  std::vector<at::Tensor> gradients(all.size());
  for (std::size_t i = all.size(); i-- > 0;) {
    if (!tracked[i]) continue;
    gradients[i] = std::move(found.back());
    found.pop_back();
  }
  return gradients;
}

}  // namespace lowtide::phantom
