#include "phantom/device/install.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "phantom/device/boxed_kernel.h"
#include "phantom/device/device_allocator.h"
#include "phantom/device/device_guard.h"
#include "phantom/device/device_hooks.h"
#include "phantom/device/kernels.h"
#include "phantom/device/phantom_device.h"
#include "phantom/device/rms_norm.h"

namespace lowtide::phantom {
namespace {

using c10::DispatchKey;
using torch::Library;

// Registrations end when their Library is destroyed; these last as long as the
// process.
class Registrations {
 public:
  Registrations() {
    library("_", DispatchKey::PrivateUse1)
        .fallback(torch::CppFunction::makeFromBoxedFunction<&boxed_kernel>());
    Library& aten = library("aten", DispatchKey::PrivateUse1);
    register_storage_kernels(aten);
    register_copy_kernels(aten);
    register_attention_kernels(aten);
    register_norm_kernels(aten);
    register_dropout_kernels(aten);
    register_wide_gemm_kernels(aten);
    register_log_sigmoid(aten);
    register_pinned_kernels(aten);
    Library& autograd = library("aten", DispatchKey::AutogradPrivateUse1);
    if (phantom_device().exact()) {
      register_rms_norm_autograd(autograd);
    } else {
      for (Library* each : {&aten, &autograd}) {
        register_attention_padding(*each);
        register_wide_softmax(*each);
      }
    }
    Library& fallback = library("_", DispatchKey::AutocastPrivateUse1);
    register_autocast(fallback,
                      library("aten", DispatchKey::AutocastPrivateUse1));
  }

 private:
  Library& library(const char* name, DispatchKey key) {
    libraries_.push_back(std::make_unique<Library>(Library::IMPL, name, key,
                                                   __FILE__, __LINE__));
    return *libraries_.back();
  }

  std::vector<std::unique_ptr<Library>> libraries_;
};

// The engine's queues are protected; a derived class may name them.
class Engine : public torch::autograd::Engine {
 public:
  static bool has_device_threads() {
    const auto queues = &Engine::device_ready_queues_;
    return !(torch::autograd::Engine::get_default_engine().*queues).empty();
  }
};

void start_autograd_threads() {
  const at::AutoGradMode grad_mode(true);
  const auto leaf = at::ones({}).set_requires_grad(true);
  torch::autograd::backward({leaf * leaf}, {});
  if (Engine::has_device_threads()) return;
  throw Error(base::error_text(
      "phantom", "an install before the first backward of the process",
      "one after it",
      "Call lowtide.phantom.install() first: autograd starts its threads, one "
      "for each device, at the first backward."));
}

}  // namespace

void install(Options options) {
  install_device(std::move(options));
  c10::SetAllocator(kPhantom, &device_allocator());
  c10::impl::registerDeviceGuard(kPhantom, &device_guard());
  at::RegisterPrivateUse1HooksInterface(&device_hooks());
  static const auto* registrations =
      std::make_unique<Registrations>().release();
  LOWTIDE_INVARIANT(registrations != nullptr, "kernels are registered");
  start_autograd_threads();
}

}  // namespace lowtide::phantom
