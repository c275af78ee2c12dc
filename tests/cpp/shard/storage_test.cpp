#include "shard/storage.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "base/check.h"
#include "base/wrapped_bytes.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::HasSubstr;
using testing::ThrowsMessage;

class RepointedStorageTest : public testing::Test {
 protected:
  RepointedStorage storage_{c10::Device(c10::DeviceType::CPU)};
  at::Tensor matrix_ = storage_.view(at::kFloat, {2, 3}, {3, 1});
  std::array<float, 6> first_ = {1, 2, 3, 4, 5, 6};
  std::array<float, 6> second_ = {6, 5, 4, 3, 2, 1};
};

TEST_F(RepointedStorageTest, TensorsAndTheirViewsFollow) {
  const at::Tensor alias = matrix_.detach();
  const at::Tensor row = storage_.view(at::kFloat, {3}, {1}, 3);
  storage_.bind(first_.data(), sizeof first_);
  EXPECT_EQ(matrix_.const_data_ptr(), first_.data());
  EXPECT_EQ(row[0].item<float>(), 4);
  const at::Tensor transposed = matrix_.t();
  storage_.bind(second_.data(), sizeof second_);
  EXPECT_EQ(alias[0][0].item<float>(), 6);
  EXPECT_EQ(row[0].item<float>(), 3);
  EXPECT_EQ(transposed[2][0].item<float>(), 4);
}

TEST_F(RepointedStorageTest, WhatIsWithinAnotherShowsAPartOfItsBytes) {
  RepointedStorage owner(storage_.view(at::kFloat, {0}, {1}).device());
  owner.own(c10::GetCPUAllocator()->allocate(sizeof first_ + 64),
            sizeof first_ + 64);
  storage_.bind_within(owner, 64, sizeof first_);
  EXPECT_EQ(matrix_.const_data_ptr(),
            static_cast<const char*>(owner.data()) + 64);
  EXPECT_EQ(matrix_.storage().nbytes(), sizeof first_);
  // What the allocator knows is the whole: of parts, and of parts of parts.
  const auto part = sub_storage(matrix_.storage(), 8, 8);
  EXPECT_EQ(part.data(), matrix_.data_ptr<float>() + 2);
  for (const auto& shows : {matrix_.storage(), part}) {
    const auto& theirs = base::innermost(shows.data_ptr());
    EXPECT_EQ(theirs.get(), owner.data());
    EXPECT_EQ(theirs.get_deleter(), c10::GetCPUAllocator()->raw_deleter());
  }
  storage_.unbind();
  EXPECT_NE(owner.data(), nullptr);
}

// torch takes what a storage shows when it sends a tensor to another process.
TEST_F(RepointedStorageTest, WhatIsTakenFromAPartKeepsTheWhole) {
  static bool given_back;
  given_back = false;
  RepointedStorage owner(c10::Device(c10::DeviceType::CPU));
  owner.own({first_.data(), first_.data(), [](void*) { given_back = true; },
             c10::Device(c10::DeviceType::CPU)},
            sizeof first_);
  storage_.bind_within(owner, 0, sizeof first_);
  auto taken = matrix_.storage().set_data_ptr(
      c10::DataPtr(first_.data(), c10::Device(c10::DeviceType::CPU)));
  storage_.unbind();
  owner.unbind();
  EXPECT_FALSE(given_back);
  taken.clear();
  EXPECT_TRUE(given_back);
}

TEST_F(RepointedStorageTest, RepointingLeavesVersionsAlone) {
  matrix_.set_requires_grad(true);
  const auto version = matrix_._version();
  storage_.bind(first_.data(), sizeof first_);
  storage_.unbind();
  storage_.bind(second_.data(), sizeof second_);
  EXPECT_EQ(matrix_._version(), version);
  EXPECT_TRUE(matrix_.is_leaf());
}

TEST_F(RepointedStorageTest, WhatAutogradSavedFollowsToo) {
  storage_.bind(first_.data(), sizeof first_);
  matrix_.set_requires_grad(true);
  const at::Tensor x = at::ones({3}).set_requires_grad(true);
  const at::Tensor y = matrix_.mv(x).sum();
  storage_.unbind();
  storage_.bind(second_.data(), sizeof second_);
  y.backward();
  EXPECT_TRUE(x.grad().equal(at::tensor({9.f, 7.f, 5.f})));
}

TEST_F(RepointedStorageTest, UnboundHasNoBytesAndRaisesOnUse) {
  storage_.bind(first_.data(), sizeof first_);
  storage_.unbind();
  EXPECT_EQ(storage_.data(), nullptr);
  EXPECT_EQ(matrix_.storage().nbytes(), 0u);
  EXPECT_EQ(matrix_.sizes(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_THROW(matrix_.select(0, 0), c10::Error);
  EXPECT_THROW(matrix_.mm(at::ones({3, 1})), c10::Error);
  EXPECT_THROW(at::ones({1, 2}).mm(matrix_), c10::Error);
}

TEST_F(RepointedStorageTest, ReadsOfWhatWasGivenBackRaiseTheirError) {
  storage_.bind(first_.data(), sizeof first_);
  const at::Tensor alias = matrix_.detach();
  storage_.set_read_error("gone");
  EXPECT_EQ(alias.sum().item<float>(), 21);
  storage_.unbind();
  const auto gone = [](const auto& read) {
    EXPECT_THAT(read, ThrowsMessage<c10::Error>(HasSubstr("gone")));
  };
  gone([&] { matrix_.sum(); });
  gone([&] { alias.add(1); });
  gone([&] { alias.select(0, 0).clone(); });
  gone([&] { alias.mm(at::ones({3, 1})); });
  gone([&] { alias.zero_(); });
  gone([&] { alias.t()[0][0].item<float>(); });
  gone([&] { (void)matrix_.data_ptr<float>(); });
  EXPECT_EQ(storage_.data(), nullptr);
  storage_.bind(second_.data(), sizeof second_);
  EXPECT_EQ(alias[0][0].item<float>(), 6);
  alias.zero_();
  EXPECT_EQ(second_[0], 0);
}

TEST_F(RepointedStorageTest, CountsWhoHoldsIt) {
  const auto before = storage_.use_count();
  {
    const at::Tensor alias = matrix_.view({6});
    EXPECT_EQ(storage_.use_count(), before + 1);
  }
  EXPECT_EQ(storage_.use_count(), before);
}

TEST_F(RepointedStorageTest, NeverShrinksOrGrows) {
  storage_.bind(first_.data(), sizeof first_);
  EXPECT_THROW(matrix_.resize_({7}), Error);
  EXPECT_FALSE(matrix_.is_inference());
}

TEST(StorageTest, LeasedBytesLiveAsLongAsAnyTensor) {
  static bool freed;
  freed = false;
  const auto release = [](void*) { freed = true; };
  std::array<float, 4> bytes = {1, 2, 3, 4};
  at::Tensor flat;
  {
    const c10::Storage storage =
        owning_storage(c10::DataPtr(bytes.data(), bytes.data(), release,
                                    c10::Device(c10::DeviceType::CPU)),
                       sizeof bytes);
    flat = flat_view(storage, at::kFloat, 4, 3);
  }
  EXPECT_FALSE(freed);
  EXPECT_TRUE(flat.equal(at::tensor({2.f, 3.f, 4.f})));
  flat.reset();
  EXPECT_TRUE(freed);
}

TEST(StorageTest, ASliceStartsAtAWholeElement) {
  std::array<float, 4> bytes = {};
  const c10::Storage storage = owning_storage(
      c10::DataPtr(bytes.data(), c10::Device(c10::DeviceType::CPU)),
      sizeof bytes);
  EXPECT_THAT([&] { flat_view(storage, at::kFloat, 6, 1); },
              ThrowsMessage<Error>(HasSubstr(
                  "internal invariant failed: a slice starts at a whole")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
