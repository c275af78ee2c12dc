// What a collective takes of the calling thread's state, but for Python's.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalPythonObjects.h>

namespace lowtide::comm {

// [Note: Python in a group's threads]
// gloo's group keeps the state of the thread that called, and lets go of it on
// a thread of its own behind the result.  Where that is while the interpreter
// ends, what is Python's in it ends the process (std::terminate): on torch 2.14
// and 2.15 a backward keeps its context variables there, and a program whose
// last collective is a backward's ended so once in a few times.  A collective
// asks for neither those nor modes of torch functions: while this lives the
// thread has none.
class WithoutPythonState {
 public:
  WithoutPythonState()
      : functions_(at::impl::PythonTorchFunctionTLS::get_state()),
        objects_(at::impl::ThreadLocalPythonObjects::get_state()) {
    while (at::impl::PythonTorchFunctionTLS::stack_len() > 0) {
      at::impl::PythonTorchFunctionTLS::pop_stack();
    }
    at::impl::ThreadLocalPythonObjects::set_state({});
  }
  ~WithoutPythonState() {
    at::impl::ThreadLocalPythonObjects::set_state(objects_);
    at::impl::PythonTorchFunctionTLS::set_state(functions_);
  }
  WithoutPythonState(const WithoutPythonState&) = delete;
  WithoutPythonState& operator=(const WithoutPythonState&) = delete;

 private:
  const at::impl::PythonTorchFunctionTLS functions_;
  const at::impl::ThreadLocalPythonObjects objects_;
};

}  // namespace lowtide::comm
