#include "base/tensor_over.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

namespace lowtide::base {
namespace LOWTIDE_FILE {

TEST(TensorOverTest, IsAViewOfTheStoragesBytes) {
  const at::Tensor all = at::arange(12, at::kFloat);
  const auto part = tensor_over(all.storage(), at::kFloat, {2, 3}, {3, 1}, 4);
  EXPECT_TRUE(part.equal(all.narrow(0, 4, 6).view({2, 3})));
  EXPECT_TRUE(part.is_alias_of(all));
}

// A unit may be gathered first under inference_mode, and trained later.
TEST(TensorOverTest, IsANormalTensorInInferenceModeToo) {
  const at::Tensor all = at::zeros({4});
  const c10::InferenceMode inference;
  EXPECT_FALSE(
      tensor_over(all.storage(), at::kFloat, {4}, {1}, 0).is_inference());
}

TEST(TensorOverTest, BytesBeginWhereTheTensorDoes) {
  const at::Tensor all = at::arange(8, at::kShort);
  const auto bytes = bytes_of(all.narrow(0, 3, 2));
  EXPECT_EQ(bytes.scalar_type(), at::kByte);
  EXPECT_EQ(bytes.numel(), 4);
  EXPECT_EQ(bytes.data_ptr(), all[3].data_ptr());
}

TEST(TensorOverTest, AStorageGivesItsLeaseBackWithTheLastTensor) {
  bool given_back = false;
  float values[4] = {};
  const auto set = [](void* context) { *static_cast<bool*>(context) = true; };
  {
    at::Tensor tensor;
    {
      const auto storage = owning_storage(
          c10::DataPtr(values, &given_back, set, c10::kCPU), sizeof(values));
      EXPECT_EQ(storage.nbytes(), sizeof(values));
      EXPECT_FALSE(storage.resizable());
      tensor = tensor_over(storage, at::kFloat, {4}, {1}, 0);
    }
    EXPECT_FALSE(given_back);
  }
  EXPECT_TRUE(given_back);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::base
