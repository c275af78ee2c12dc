// With NCCL's functions those below, which this executable has.
#include "comm/nccl_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace lowtide::comm {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

struct Nccl {
  std::vector<std::string> calls;
  int start_result = 0;
  int end_result = 0;
};
Nccl nccl;

class NcclGroupTest : public testing::Test {
 protected:
  NcclGroupTest() { nccl = {}; }
};

TEST_F(NcclGroupTest, OnlyWhereTorchCallsForEachTensor) {
  EXPECT_TRUE(groups_lists("nccl2"));
  EXPECT_TRUE(groups_lists("nccl-lazy"));
  EXPECT_FALSE(groups_lists("nccl"));
  EXPECT_FALSE(groups_lists("gloo"));
}

TEST_F(NcclGroupTest, NotOnCommunicatorsThatDoNotBlock) {
  setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1", 1);
  EXPECT_FALSE(groups_lists("nccl2"));
  setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "0", 1);
  EXPECT_TRUE(groups_lists("nccl2"));
  unsetenv("TORCH_NCCL_USE_COMM_NONBLOCKING");
}

TEST_F(NcclGroupTest, IsLaunchedOnce) {
  {
    NcclGroup group;
    EXPECT_THAT(nccl.calls, ElementsAre("start"));
    group.launch();
    EXPECT_THAT(nccl.calls, ElementsAre("start", "end"));
  }
  EXPECT_THAT(nccl.calls, ElementsAre("start", "end"));
}

// Else every later call of the thread's would be held back.
TEST_F(NcclGroupTest, IsClosedWhenACallInItThrows) {
  EXPECT_THROW(
      {
        const NcclGroup group;
        throw std::logic_error("the store is gone");
      },
      std::logic_error);
  EXPECT_THAT(nccl.calls, ElementsAre("start", "end"));
}

TEST_F(NcclGroupTest, ARefusalIsThrownInNcclsWords) {
  nccl.start_result = 3;
  EXPECT_THAT([] { NcclGroup(); }, ThrowsMessage<std::runtime_error>(
                                       "ncclGroupStart: words for 3 (3)"));
  nccl.start_result = 0;
  nccl.end_result = 1;
  EXPECT_THAT(
      [] { NcclGroup().launch(); },
      ThrowsMessage<std::runtime_error>("ncclGroupEnd: words for 1 (1)"));
}

TEST_F(NcclGroupTest, ALaunchThatIsNotOverIsRefused) {
  nccl.end_result = 7;
  EXPECT_THAT([] { NcclGroup().launch(); },
              ThrowsMessage<std::runtime_error>(
                  HasSubstr("TORCH_NCCL_USE_COMM_NONBLOCKING=1")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::comm

extern "C" {
int ncclGroupStart() {
  auto& nccl = lowtide::comm::LOWTIDE_FILE::nccl;
  nccl.calls.push_back("start");
  return nccl.start_result;
}
int ncclGroupEnd() {
  auto& nccl = lowtide::comm::LOWTIDE_FILE::nccl;
  nccl.calls.push_back("end");
  return nccl.end_result;
}
const char* ncclGetErrorString(int result) {
  static std::string words;
  words = "words for " + std::to_string(result);
  return words.c_str();
}
}
