#include "comm/interpreter_lock.h"

#include <c10/util/env.h>

#include <utility>

// Of the process's interpreter: linked weakly, null in a program without one.
extern "C" {
[[gnu::weak]] int Py_IsInitialized();
[[gnu::weak]] int PyGILState_Ensure();
[[gnu::weak]] void PyGILState_Release(int state);
}

namespace lowtide::comm {

bool records_with_interpreter(std::string_view backend) {
  // As torch's FlightRecorder.hpp reads them; it records 2,000 by default.
  for (const char* name :
       {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    if (const auto size = c10::utils::get_env(name)) {
      if (*size == "0") return false;
      break;
    }
  }
  return backend == "nccl2" && PyGILState_Ensure != nullptr &&
         PyGILState_Release != nullptr && Py_IsInitialized != nullptr;
}

InterpreterLock::InterpreterLock(bool wanted)
    : held_(wanted && Py_IsInitialized() != 0) {
  if (held_) state_ = PyGILState_Ensure();
}

void InterpreterLock::release() {
  if (std::exchange(held_, false)) PyGILState_Release(state_);
}

}  // namespace lowtide::comm
