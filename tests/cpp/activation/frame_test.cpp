#include "activation/frame.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/check.h"
#include "harness.h"

namespace lowtide::activation {
namespace LOWTIDE_FILE {

using testing::HasSubstr;
using testing::ThrowsMessage;

// A forward of two operators that save their argument, by hand.
struct Forward final : Replay {
  using Run =
      std::function<void(const std::vector<at::Tensor>&, Recomputation&)>;
  Forward(Run run, int& num_runs) : body(std::move(run)), runs(num_runs) {}
  void run(const std::vector<at::Tensor>& inputs,
           Recomputation& recomputation) override {
    ++runs;
    body(inputs, recomputation);
  }
  Run body;
  int& runs;
};

void doubles_twice(const std::vector<at::Tensor>& inputs,
                   Recomputation& recomputation) {
  const at::NoGradGuard no_grad;
  if (recomputation.pack(inputs[0].detach())) return;
  recomputation.pack(inputs[0] * 2);
}

class FrameTest : public testing::Test {
 protected:
  std::shared_ptr<Frame> begin(const at::Tensor& input,
                               Forward::Run run = doubles_twice,
                               Policy policy = {}) {
    region_ = std::make_shared<Region>(
        "checkpoint(Block)", std::move(policy), std::make_shared<NameBook>(),
        [this](const c10::Device&) {
          return std::make_shared<Transfers>(device_.memories);
        });
    return std::make_shared<Frame>(
        region_, std::vector<at::Tensor>{input},
        std::make_unique<Forward>(std::move(run), num_runs_));
  }

  // Of two inputs that are on the host only, as regions behind it have run.
  std::shared_ptr<Frame> offloaded(Device& device) {
    Policy policy;
    policy.names[kInputName] = Treatment::offload;
    const auto region = std::make_shared<Region>(
        "checkpoint(Block)", std::move(policy), std::make_shared<NameBook>(),
        [&device](const c10::Device&) {
          return std::make_shared<Transfers>(device.memories);
        });
    std::vector<at::Tensor> inputs;
    for (const float value : {3.0F, 4.0F}) {
      inputs.push_back(device.produce(value).requires_grad_() * 1);
    }
    const auto frame = std::make_shared<Frame>(
        region, inputs, std::make_unique<Forward>(doubles_twice, num_runs_));
    frame->pack(inputs[0]);
    frame->end_forward();
    std::vector<std::shared_ptr<Batch>> later;
    for (int i = 0; i < 3; ++i) {
      later.push_back(region->transfers()->open({}, "checkpoint(Block)"));
    }
    return frame;
  }

  Device device_;
  std::shared_ptr<Region> region_;
  int num_runs_ = 0;
};

TEST_F(FrameTest, GivesBackWhatWasSaved) {
  const at::Tensor x = at::arange(4, at::kFloat);
  const auto frame = begin(x);
  EXPECT_EQ(frame->pack(x), 0u);
  EXPECT_EQ(frame->pack(x * 2), 1u);
  frame->end_forward();
  EXPECT_TRUE(at::equal(frame->unpack(1), x * 2));
  EXPECT_TRUE(at::equal(frame->unpack(0), x));
  // Outside of a backward nothing is kept from one to the next.
  EXPECT_EQ(num_runs_, 2);
}

TEST_F(FrameTest, StopsBehindTheLastTensorThatIsStillNeeded) {
  const at::Tensor x = at::arange(4, at::kFloat);
  bool stopped = false;
  const auto frame = begin(x, [&](const auto& inputs, auto& recomputation) {
    stopped = recomputation.pack(inputs[0]);
    if (!stopped) recomputation.pack(inputs[0] * 2);
  });
  frame->pack(x);
  frame->pack(x * 2);
  frame->end_forward();
  frame->unpack(0);
  EXPECT_FALSE(stopped);
  frame->drop(1);
  frame->unpack(0);
  EXPECT_TRUE(stopped);
}

TEST_F(FrameTest, HoldsItsInputAndNothingElse) {
  at::Tensor x = at::arange(4, at::kFloat);
  at::Tensor y = x * 2;
  const auto weak_x = x.storage().getWeakStorageImpl();
  const auto weak_y = y.storage().getWeakStorageImpl();
  auto frame = begin(x);
  frame->pack(y);
  frame->end_forward();
  x.reset();
  y.reset();
  EXPECT_FALSE(weak_x.expired());
  EXPECT_TRUE(weak_y.expired());
  frame.reset();
  EXPECT_TRUE(weak_x.expired());
}

TEST_F(FrameTest, AnOffloadedInputIsTheHosts) {
  Policy policy;
  policy.names[kInputName] = Treatment::offload;
  at::Tensor leaf = device_.produce(3).requires_grad_();
  at::Tensor x = leaf.view({kNumel / 4, 4}) * 1;
  // As an operator on the device would have produced it.
  const auto frame = begin(x, doubles_twice, policy);
  const auto figures = region_->figures().names().at(kInputName);
  EXPECT_EQ(figures.moved, 1);
  EXPECT_EQ(figures.moved_bytes, kBytes);
  EXPECT_EQ(device_.host_bytes(), kBytes);
  frame->pack(x);
  frame->end_forward();
  EXPECT_TRUE(at::equal(frame->unpack(0), x));
}

// Whichever wait fails, and all that follow: destructors of what the
// recomputation uses must not throw on top of it.
TEST_F(FrameTest, ABrokenDeviceIsAnErrorOfTheRecomputation) {
  int num_failed = 0;
  for (std::size_t k = 0;; ++k) {
    Device device;
    const auto frame = offloaded(device);
    device.waits->fail(k);
    try {
      frame->unpack(0);
      break;
    } catch (const std::runtime_error& error) {
      EXPECT_THAT(error.what(), HasSubstr("launch failure"));
      ++num_failed;
    }
  }
  EXPECT_GE(num_failed,
            6);  // two copies back, each behind two events; two gets
}

TEST_F(FrameTest, RefusesAnInputThatWasWrittenTo) {
  at::Tensor x = at::arange(4, at::kFloat) * 1;
  const auto frame = begin(x);
  frame->pack(x * 2);
  frame->end_forward();
  x.add_(1);
  EXPECT_THAT([&] { frame->unpack(0); },
              ThrowsMessage<Error>(HasSubstr(
                  "checkpoint(Block): expected tensor argument 0 at version 0, "
                  "as the forward received it, got version 1")));
}

TEST_F(FrameTest, RefusesASavedTensorThatWasWrittenTo) {
  const at::Tensor x = at::arange(4, at::kFloat);
  at::Tensor y = x * 2;
  const auto frame = begin(x);
  frame->pack(y);
  frame->end_forward();
  y.add_(1);
  EXPECT_THAT([&] { frame->unpack(0); },
              ThrowsMessage<Error>(
                  HasSubstr("the tensor saved as number 0 at version 0, got "
                            "version 1: something wrote to it in place")));
}

TEST_F(FrameTest, RefusesARecomputationThatDiffers) {
  const at::Tensor x = at::arange(4, at::kFloat);
  const auto other_shape =
      begin(x, [](const auto& inputs, auto& recomputation) {
        recomputation.pack(inputs[0].slice(0, 0, 2));
      });
  other_shape->pack(x);
  other_shape->end_forward();
  EXPECT_THAT([&] { other_shape->unpack(0); },
              ThrowsMessage<Error>(HasSubstr(
                  "saved tensor 0 to be Float[4], got Float[2]. Make the "
                  "forward a function of its arguments")));

  const auto fewer = begin(x, [](const auto&, auto&) {});
  fewer->pack(x);
  fewer->end_forward();
  EXPECT_THAT(
      [&] { fewer->unpack(0); },
      ThrowsMessage<Error>(HasSubstr("at least 1 saved tensors, got 0. Make")));
}

TEST_F(FrameTest, AFailedRecomputationLeavesTheFrameUsable) {
  const at::Tensor x = at::arange(4, at::kFloat);
  bool fails = true;
  const auto frame = begin(x, [&](const auto& inputs, auto& recomputation) {
    if (fails) throw std::runtime_error("boom");
    recomputation.pack(inputs[0]);
  });
  frame->pack(x);
  frame->end_forward();
  EXPECT_THROW(frame->unpack(0), std::runtime_error);
  EXPECT_EQ(Frame::Scope::current(), nullptr);
  fails = false;
  EXPECT_TRUE(at::equal(frame->unpack(0), x));
}

// Generators are where they were, in the recomputation and after it.
TEST_F(FrameTest, ReplaysRandomNumbers) {
  at::manual_seed(7);
  const at::Tensor x = at::arange(4, at::kFloat);
  const auto frame = begin(x, [](const auto&, auto& recomputation) {
    recomputation.pack(at::rand({4}));
  });
  const at::Tensor noise = at::rand({4});
  frame->pack(noise);
  frame->end_forward();
  const at::Tensor after = at::rand({4});
  at::manual_seed(7);
  at::rand({8});
  const at::Tensor next = at::rand({4});
  at::manual_seed(7);
  at::rand({8});
  EXPECT_TRUE(at::equal(frame->unpack(0), noise));
  EXPECT_TRUE(at::equal(at::rand({4}), next));
  EXPECT_FALSE(at::equal(after, noise));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::activation
