// The devices whose kernels a test checks: the CPU, and CUDA where there is
// one.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>
#ifdef LOWTIDE_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace lowtide::ops {

inline std::vector<at::DeviceType> devices() {
  std::vector<at::DeviceType> all{at::kCPU};
#ifdef LOWTIDE_WITH_CUDA
  if (c10::cuda::device_count() > 0) all.push_back(at::kCUDA);
#endif
  return all;
}

// INSTANTIATE_TEST_SUITE_P(Devices, MyTest, on_devices(), device_name)
inline auto on_devices() { return testing::ValuesIn(devices()); }

inline std::string device_name(
    const testing::TestParamInfo<at::DeviceType>& info) {
  return info.param == at::kCPU ? "cpu" : "cuda";
}

// Floats as bits, on the CPU: NaN equals itself, 0.0 is not -0.0.
inline at::Tensor bits(const at::Tensor& tensor) {
  const auto host = tensor.to(at::kCPU).contiguous();
  return host.element_size() == 4 ? host.view(at::kInt) : host.view(at::kShort);
}

inline constexpr at::ScalarType kKernelTypes[] = {at::kFloat, at::kBFloat16,
                                                  at::kHalf};

}  // namespace lowtide::ops
