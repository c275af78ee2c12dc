// Every wait of the copies matters: without it a step breaks a rule of the
// stream order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness.h"

namespace lowtide::activation {
namespace LOWTIDE_FILE {

using testing::AllOf;
using testing::AnyOf;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kNever = -1;

struct Outcome {
  std::vector<std::string> violations;
  std::vector<std::string> waits;
};

template <typename Use>
Outcome without_wait(int k, Use&& use) {
  Device device;
  device.waits->skip(k);
  use(device);
  return {device.scripted->violations(), device.waits->waits()};
}

// The waits nobody misses in `use`, and what skipping the others breaks.
struct Findings {
  std::vector<std::string> superfluous;
  std::vector<std::string> broken;
};

template <typename Use>
Findings skip_each(Use&& use) {
  const Outcome complete = without_wait(kNever, use);
  EXPECT_THAT(complete.violations, IsEmpty());
  EXPECT_GT(complete.waits.size(), 0u);
  Findings findings;
  for (std::size_t k = 0; k < complete.waits.size(); ++k) {
    const Outcome outcome = without_wait(static_cast<int>(k), use);
    if (outcome.violations.empty()) {
      findings.superfluous.push_back(complete.waits[k]);
    }
    for (const auto& violation : outcome.violations) {
      findings.broken.push_back(complete.waits[k] + ": " + violation);
    }
  }
  return findings;
}

// Sends a value to the host that nobody else holds, and lets it go.
std::unique_ptr<Stash> sent(Device& device) {
  at::Tensor value = device.produce(1);
  auto stash = std::make_unique<Stash>(device.memories, "residual", value);
  stash->copy_out(device.now());
  value.reset();
  stash->let_go();
  return stash;
}

void train(Device& device, Window window) {
  Stack stack(device, window);
  for (int step = 0; step < 2; ++step) stack.step(5);
}

// On one compute stream, compute stands between a copy out and the copy back
// of the same bytes, and between a copy back and the next copy out to the same
// slot: these edges are for what compute does not order.  And the values that
// never left go newest first, so that the wait for the newest copy out covers
// the others.  The tests below show each of them needed.
TEST(WaitsTest, AllMatterButThoseThatOthersStandFor) {
  for (const std::int64_t prefetch : {0, 1, 2}) {
    const Findings findings = skip_each(
        [&](Device& device) { train(device, {.prefetch = prefetch}); });
    EXPECT_THAT(findings.superfluous,
                Each(AnyOf("reload after offload", "offload after reload",
                           "compute after offload")));
    EXPECT_THAT(findings.broken, Contains(HasSubstr("offload after compute")));
    EXPECT_THAT(findings.broken, Contains(HasSubstr("reload after compute")));
    EXPECT_THAT(findings.broken, Contains(HasSubstr("compute after reload")));
  }
}

// The copy out reads what compute produced.
TEST(WaitsTest, WithoutTheReadyEventTheCopyReadsTooEarly) {
  const Findings findings =
      skip_each([](Device& device) { train(device, {.prefetch = 0}); });
  EXPECT_THAT(
      findings.broken,
      Contains(AllOf(HasSubstr("offload after compute: read on offload"),
                     HasSubstr("does not wait for the write"))));
}

// Nobody else holds the argument when its bytes are let go.
TEST(WaitsTest, WithoutTheWaitForTheCopyTheSourceIsFreedTooEarly) {
  const Findings findings = skip_each([](Device& device) { sent(device); });
  EXPECT_THAT(findings.superfluous, IsEmpty());
  EXPECT_THAT(findings.broken,
              Contains(AllOf(HasSubstr("compute after offload: release"),
                             HasSubstr("compute does not wait for the read"))));
}

// A value whose ready event is older than the slot's last copy back.
TEST(WaitsTest, WithoutTheWaitForTheSlotItIsReusedTooEarly) {
  const Findings findings = skip_each([](Device& device) {
    at::Tensor late = device.produce(2);
    const device::Event ready = device.now();
    device.consume(sent(device)->on_device());
    Stash stash(device.memories, "residual", late);
    late.reset();
    stash.copy_out(ready);
    stash.let_go();
  });
  EXPECT_THAT(findings.superfluous,
              Each(AnyOf("reload after offload", "offload after compute")));
  EXPECT_THAT(
      findings.broken,
      Contains(AllOf(HasSubstr("offload after reload: write on offload"),
                     HasSubstr("does not wait for the read"))));
}

// Reading before the copy is there, and letting go of its buffer before.
TEST(WaitsTest, WithoutTheWaitForTheCopyBackItIsReadTooEarly) {
  const Findings findings =
      skip_each([](Device& device) { train(device, {.prefetch = 1}); });
  EXPECT_THAT(findings.broken,
              Contains(AllOf(HasSubstr("compute after reload: read on compute"),
                             HasSubstr("does not wait for the write"))));
  const Findings unused =
      skip_each([](Device& device) { sent(device)->fetch(); });
  EXPECT_THAT(
      unused.broken,
      Contains(AllOf(HasSubstr("compute after reload: release"),
                     HasSubstr("compute does not wait for the write"))));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::activation
