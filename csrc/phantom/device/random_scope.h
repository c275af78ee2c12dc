// Makes a host kernel draw from the phantom device's generator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <mutex>
#include <vector>

#include "phantom/device/generator.h"

namespace lowtide::phantom {

// For the length of one call.  Locks the generators it lends.
class RandomScope {
 public:
  // Replaces generators among the call's arguments, the last ones on `stack`,
  // by host ones, and a missing one by the default's.  Throws lowtide::Error
  // for a generator of another device.
  RandomScope(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  // Lends `generator` to kernels that take none and use the CPU's default.
  explicit RandomScope(const at::Generator& generator);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  at::Generator lend(const at::Generator& generator);
  void lend_as_cpu_default(const at::Generator& generator);

  std::vector<PhantomGenerator*> lent_;
  std::vector<std::unique_lock<std::mutex>> locks_;
  at::Tensor cpu_state_;  // defined while the CPU's default is borrowed
};

}  // namespace lowtide::phantom
