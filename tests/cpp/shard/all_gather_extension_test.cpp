#include "shard/parameters/all_gather_extension.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "shard/parameters/parameter_buffers.h"
#include "testing/recording_collectives.h"
#include "testing/scripted_runtime.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using comm::RecordingCollectives;
using memory::Category;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::int64_t kRanks = 2;

// Sends bytes and a scale; the full parameter is of both, and of a tensor of
// its own.
class Quantized final : public AllGatherExtension {
 public:
  std::vector<at::Tensor> inputs() override {
    return {at::full({3, 2}, 7, at::kByte), at::full({1}, 0.5, at::kFloat)};
  }

  Made arrived(const std::vector<at::Tensor>& gathered,
               bool from_parts) override {
    seen_from_parts.push_back(from_parts);
    storages.push_back(gathered[0].storage().unsafeGetStorageImpl());
    values = gathered[0].to(at::kFloat) * gathered[1].sum();
    if (own.defined()) {
      own.copy_(values);
      return {};
    }
    own = values.clone();
    return {{own}, {gathered[0], own, own.view({-1, 2})}};
  }

  std::vector<bool> passing() override {
    return passes ? std::vector<bool>{true, true} : std::vector<bool>{};
  }

  bool passes = false;
  std::vector<bool> seen_from_parts;
  std::vector<const c10::StorageImpl*> storages;
  at::Tensor values;
  at::Tensor own;
};

class ExtendedParametersTest : public testing::Test {
 protected:
  ExtendedParametersTest() {
    auto extension = std::make_unique<Quantized>();
    extension_ = extension.get();
    buffers_.use(std::move(extension));
    buffers_.load_full(0, at::arange(8).view({4, 2}).to(at::kFloat));
  }

  std::vector<at::Tensor> gather() {
    buffers_.gather(collectives_)->wait();
    buffers_.unpack();
    auto made = buffers_.make_extended(false);
    buffers_.arrived();
    return made;
  }

  std::int64_t live() const {
    return ledger_->live()[static_cast<std::size_t>(Category::gathered)];
  }

  static std::vector<ParameterInfo> infos() {
    return {{"plain", {4, 2}, at::kFloat, at::kFloat, at::kFloat},
            {"quantized", {6, 2}, at::kFloat, at::kFloat, at::kFloat, 0, true}};
  }

  std::shared_ptr<device::ScriptedRuntime> runtime_ =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  std::shared_ptr<memory::DeviceMemory> memory_ =
      std::make_shared<memory::DeviceMemory>(runtime_, ledger_);
  RecordingCollectives collectives_{0, kRanks, runtime_};
  ParameterBuffers buffers_{std::make_shared<const std::string>("unit"),
                            infos(), kRanks, 0, memory_};
  Quantized* extension_ = nullptr;
  std::unique_ptr<device::AllocationObserver> watch_ =
      runtime_->watch_torch_allocations();
};

TEST_F(ExtendedParametersTest, WhatTheySendJoinsTheUnitsOneGather) {
  const auto made = gather();
  ASSERT_EQ(made.size(), 1u);
  ASSERT_EQ(collectives_.calls().size(), 1u);
  EXPECT_THAT(collectives_.calls()[0].full_bytes, ElementsAre(32, 12, 8));
  EXPECT_TRUE(at::equal(extension_->values, at::full({12}, 7.0)));
  // A slice of 256 B each, and what the extension made is not counted twice.
  EXPECT_EQ(buffers_.gathered_bytes(), 3 * 256);
  // In the master there is the plain parameter alone.
  EXPECT_EQ(buffers_.shard_bytes(), 256 * sizeof(float));
}

TEST_F(ExtendedParametersTest, WhatTheyAreMadeOfKeepsItsPlaceWithoutBytes) {
  const auto full = gather()[0];
  buffers_.release();
  EXPECT_EQ(data_or_null(full.storage()), nullptr);
  EXPECT_EQ(live(), 0);
  for (int again = 0; again < 2; ++again) {
    EXPECT_THAT(gather(), IsEmpty());
    EXPECT_TRUE(at::equal(full, at::full({12}, 7.0)));
    EXPECT_EQ(live(), 3 * 256 + 48);
    buffers_.release();
    EXPECT_EQ(live(), 0);
  }
  EXPECT_EQ(extension_->storages[0], extension_->storages[2]);
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ExtendedParametersTest, WhatPassesGoesWhenTheParametersAreMade) {
  extension_->passes = true;
  for (int again = 0; again < 2; ++again) {
    const auto pending = buffers_.gather(collectives_);
    EXPECT_THAT(collectives_.calls().back().full_bytes, ElementsAre(32, 12, 8));
    // The plain parameter, and the two regions.
    EXPECT_EQ(live(), 256 + 2 * 256);
    pending->wait();
    buffers_.make_extended(false);
    buffers_.arrived();
    EXPECT_TRUE(at::equal(extension_->values, at::full({12}, 7.0)));
    EXPECT_EQ(live(), 256 + (again == 0 ? 0 : 48));
    buffers_.release();
    EXPECT_EQ(live(), 0);
  }
  EXPECT_EQ(buffers_.gathered_bytes(), 256);
  EXPECT_EQ(buffers_.passing_bytes(), 2 * 256);
  EXPECT_EQ(extension_->storages[0], extension_->storages[1]);
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ExtendedParametersTest, PartsOfWhatCameAreKeptAndGatheredAgain) {
  gather();
  buffers_.keep_part(0, 2);
  EXPECT_EQ(live(), 3 * 256);
  auto values = std::exchange(extension_->values, {});
  buffers_.gather_parts(collectives_)->wait();
  EXPECT_THAT(buffers_.make_extended(true), IsEmpty());
  buffers_.drop_part();
  EXPECT_TRUE(at::equal(extension_->values, values));
  EXPECT_THAT(extension_->seen_from_parts, ElementsAre(false, true));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
