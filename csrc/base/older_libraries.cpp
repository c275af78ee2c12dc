// What a compiler of today takes from glibc and libstdc++ that those of
// manylinux_2_28, under which torch's wheels run, do not have.  Each library
// has these, hidden.  tests/python/packaging/test_libraries.py finds what is
// missing.
#include <new>
#include <sstream>

#define LOWTIDE_HIDDEN __attribute__((visibility("hidden")))

// std::shared_ptr counts without atomics while it is true: a program that
// trains has threads.
extern "C" LOWTIDE_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {
LOWTIDE_HIDDEN void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std

#if defined(__GLIBCXX__) && _GLIBCXX_USE_CXX11_ABI
// std::ostringstream's constructor without arguments is younger than the one
// with a mode, and the class is always visible: hence by its name.
extern "C" LOWTIDE_HIDDEN void
lowtide_make_ostringstream(std::ostringstream* place) __asm__(
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void lowtide_make_ostringstream(std::ostringstream* place) {
  new (place) std::ostringstream(std::ios_base::out);
}
#endif
