// What a region's operators depend on besides their arguments: the states of
// the random generators and autocast.  Captured before a forward, restored
// while it is computed again.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace lowtide::activation {

// The default generators of the CPU and of one device.
//
// While a CUDA graph captures that device's work torch lets its generator be
// neither copied nor set back: it must not be used then.
class RandomState {
 public:
  static RandomState capture(c10::Device device);
  // Whether a generator has moved on since.  Throws lowtide::Error if it can
  // not be set back.
  bool consumed() const;
  void restore() const;

 private:
  struct Saved {
    at::Generator generator;  // the default one
    at::Generator copy;
  };
  struct Captured {
    at::Generator generator;
    std::uint64_t offset;
  };
  std::vector<Saved> saved_;
  std::optional<Captured> captured_;
};

struct AutocastState {
  struct PerDevice {
    c10::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  static AutocastState capture(c10::Device device);

  std::vector<PerDevice> devices;  // the CPU and one device
  bool cache_enabled = true;
};

class ForwardState {
 public:
  // Before the forward; `device` is that of the region's inputs.
  explicit ForwardState(c10::Device device);

  // After it.  States nobody consumed are not kept.  Throws as `consumed`.
  void end_forward();

  // While alive on a thread, autocast and the generators are as they were
  // before the forward; then they are as they were before the scope.
  class Scope {
   public:
    explicit Scope(const ForwardState& state);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const AutocastState autocast_;
    const std::optional<RandomState> random_;
  };

 private:
  c10::Device device_;
  AutocastState autocast_;
  std::optional<RandomState> random_;
};

}  // namespace lowtide::activation
