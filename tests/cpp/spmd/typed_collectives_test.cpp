// Values and gradients of real ranks:
// tests/python/dist/test_spmd_collectives.py.
#include "spmd/typed_collectives.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/check.h"
#include "testing/recording_collectives.h"
#include "testing/scripted_runtime.h"

namespace lowtide::spmd {
namespace LOWTIDE_FILE {

using comm::Kind;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

// Rank 1 of 4; all ranks pass the same.
class TypedCollectivesTest : public testing::Test {
 protected:
  at::Tensor run(Operation operation, Type src, Type dst, const at::Tensor& x,
                 Dims dims = {}) {
    return apply(x, {operation, src, dst}, axis_, dims);
  }
  std::vector<Kind> kinds() const {
    std::vector<Kind> result;
    for (const auto& call : axis_->calls()) result.push_back(call.kind);
    return result;
  }
  std::shared_ptr<comm::RecordingCollectives> axis_ =
      std::make_shared<comm::RecordingCollectives>(
          1, 4, std::make_shared<device::ScriptedRuntime>());
  at::Tensor x_ = at::arange(8, at::kFloat).requires_grad_();
};

TEST_F(TypedCollectivesTest, SendsWhatTheTableSaysForwardAndBackward) {
  for (const Transition& each : kTransitions) {
    const std::size_t before = axis_->calls().size();
    const at::Tensor y =
        run(each.forward.operation, each.forward.src, each.forward.dst, x_);
    torch::autograd::backward({y}, {at::ones_like(y)});
    std::vector<Kind> expected;
    for (const Step& step : {each.forward, each.backward}) {
      if (const auto kind = wire_kind(step.operation))
        expected.push_back(*kind);
    }
    std::vector<Kind> sent = kinds();
    sent.erase(sent.begin(),
               sent.begin() + static_cast<std::ptrdiff_t>(before));
    EXPECT_EQ(sent, expected)
        << type_name(each.forward.src) << " -> " << type_name(each.forward.dst);
    EXPECT_EQ(x_.grad().sizes(), x_.sizes());
  }
}

TEST_F(TypedCollectivesTest, WithoutAGradientThereIsNoNode) {
  EXPECT_FALSE(run(Operation::all_reduce, Type::P, Type::R, x_.detach())
                   .requires_grad());
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(
      run(Operation::all_reduce, Type::P, Type::R, x_).requires_grad());
}

TEST_F(TypedCollectivesTest, AnUndefinedGradientSendsNothing) {
  const at::Tensor y = run(Operation::convert, Type::I, Type::R, x_);
  const auto node = y.grad_fn();
  EXPECT_THAT((*node)({at::Tensor()}),
              ElementsAre(testing::Truly([](const at::Tensor& gradient) {
                return !gradient.defined();
              })));
  EXPECT_THAT(kinds(), IsEmpty());
}

TEST_F(TypedCollectivesTest, TheInputKeepsItsValue) {
  run(Operation::all_reduce, Type::P, Type::R, x_);
  EXPECT_TRUE(x_.equal(at::arange(8, at::kFloat)));
}

TEST_F(TypedCollectivesTest, SlicesAreTheRanks) {
  const at::Tensor slice = run(Operation::convert, Type::R, Type::V, x_);
  EXPECT_TRUE(slice.equal(at::tensor({2.f, 3.f})));
  const at::Tensor wide = run(Operation::convert, Type::V, Type::P, slice);
  EXPECT_TRUE(wide.equal(at::tensor({0.f, 0.f, 2.f, 3.f, 0.f, 0.f, 0.f, 0.f})));
}

TEST_F(TypedCollectivesTest, RefusesWhatDoesNotDivide) {
  EXPECT_THAT(
      [&] { run(Operation::reduce_scatter, Type::P, Type::V, at::zeros({6})); },
      ThrowsMessage<InvalidArgument>(HasSubstr(
          "expected dimension 0 to be a multiple of 4, the axis's ranks, got 6 "
          "(rank 1 of 4). Pad it, or pass another dim=.")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::spmd
