// With Python's functions those below, which this executable has.
#include "comm/interpreter_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace lowtide::comm {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;

struct Python {
  std::vector<std::string> calls;
  bool runs = true;
};
Python python;

class InterpreterLockTest : public testing::Test {
 protected:
  InterpreterLockTest() { python = {}; }
};

TEST_F(InterpreterLockTest,
       OnlyWhereTorchRecordsCallsOfGroupsThatAreConnected) {
  EXPECT_TRUE(records_with_interpreter("nccl2"));
  for (const char* other : {"nccl-lazy", "nccl", "gloo"}) {
    EXPECT_FALSE(records_with_interpreter(other)) << other;
  }
}

TEST_F(InterpreterLockTest, NotWithoutARecorder) {
  for (const char* name :
       {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    setenv(name, "0", 1);
    EXPECT_FALSE(records_with_interpreter("nccl2")) << name;
    setenv(name, "20", 1);
    EXPECT_TRUE(records_with_interpreter("nccl2")) << name;
    unsetenv(name);
  }
}

TEST_F(InterpreterLockTest, TheNewerNameOfTheRecordersSizeIsReadFirst) {
  setenv("TORCH_FR_BUFFER_SIZE", "20", 1);
  setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0", 1);
  EXPECT_TRUE(records_with_interpreter("nccl2"));
  unsetenv("TORCH_FR_BUFFER_SIZE");
  unsetenv("TORCH_NCCL_TRACE_BUFFER_SIZE");
}

TEST_F(InterpreterLockTest, IsTakenAndGivenBackOnce) {
  {
    InterpreterLock lock(true);
    EXPECT_THAT(python.calls, ElementsAre("take"));
    lock.release();
    EXPECT_THAT(python.calls, ElementsAre("take", "give back 7"));
  }
  EXPECT_THAT(python.calls, ElementsAre("take", "give back 7"));
}

TEST_F(InterpreterLockTest, IsGivenBackWhenACallUnderItThrows) {
  EXPECT_THROW(
      {
        const InterpreterLock lock(true);
        throw std::runtime_error("refused");
      },
      std::runtime_error);
  EXPECT_THAT(python.calls, ElementsAre("take", "give back 7"));
}

TEST_F(InterpreterLockTest, IsNotTakenWhereItIsNotWantedOrNoneRuns) {
  { const InterpreterLock lock(false); }
  python.runs = false;
  { const InterpreterLock lock(true); }
  EXPECT_THAT(python.calls, IsEmpty());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::comm

extern "C" {
int Py_IsInitialized() { return lowtide::comm::LOWTIDE_FILE::python.runs; }
int PyGILState_Ensure() {
  lowtide::comm::LOWTIDE_FILE::python.calls.push_back("take");
  return 7;
}
void PyGILState_Release(int state) {
  lowtide::comm::LOWTIDE_FILE::python.calls.push_back("give back " +
                                                      std::to_string(state));
}
}
