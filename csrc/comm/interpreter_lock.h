// Python's interpreter, held over several calls of torch's that each take it.
//
// [Note: One turn of the interpreter]
// torch's flight recorder takes the interpreter at each call of a collective,
// for its traceback, and nccl2 makes a call of each tensor of a list.  Beside a
// thread of Python's that computes, each turn is waited for as long as
// sys.getswitchinterval() says, 5 ms: nine weights of a block wait nine times.
// Who holds the interpreter around them waits once.  What waits for other ranks
// must not be called meanwhile: they may wait for another thread of this
// process's Python.
#pragma once

#include <string_view>

namespace lowtide::comm {

// Whether torch's backend of this name records its calls, has connected to
// other ranks before, and the interpreter can be had.
bool records_with_interpreter(std::string_view backend);

class InterpreterLock {
 public:
  // None is taken where it is not `wanted`, or where none runs.
  explicit InterpreterLock(bool wanted);
  ~InterpreterLock() { release(); }
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;

  void release();

 private:
  bool held_;
  int state_ = 0;  // PyGILState_STATE
};

}  // namespace lowtide::comm
