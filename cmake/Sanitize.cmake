# LOWTIDE_SANITIZE=address|thread: everything is compiled for the sanitizer, and ctest
# passes its options on.  For the C++ tests: a Python that loads such a library would
# have to preload the sanitizer's.
#
# torch is not compiled for it.  What happens inside of torch is neither checked nor
# seen to be ordered, so reports from there are left out.
if(NOT LOWTIDE_SANITIZE)
  return()
endif()
if(NOT LOWTIDE_SANITIZE MATCHES "^(address|thread)$")
  message(FATAL_ERROR "lowtide: LOWTIDE_SANITIZE: expected address or thread, got "
    "'${LOWTIDE_SANITIZE}'. Set one of them, or nothing.")
endif()
set(sanitizers "${LOWTIDE_SANITIZE}")
if(LOWTIDE_SANITIZE STREQUAL "address")
  set(sanitizers "address,undefined")
endif()
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${sanitizers}>
  $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>
  $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
  $<$<COMPILE_LANGUAGE:CXX>:-g1> $<$<COMPILE_LANGUAGE:CXX>:-O1>)
add_link_options($<$<LINK_LANGUAGE:CXX>:-fsanitize=${sanitizers}>)
# That torch locks a mutex of its own is left out, that it unlocks it looks like our
# call where it is the last thing that a function of torch does: no reports of mutexes.
string(JOIN ":" thread_options
  suppressions=${PROJECT_SOURCE_DIR}/cmake/thread_sanitizer.txt
  report_mutex_bugs=0 allocator_may_return_null=1)
# torch keeps what it allocates once until the process ends.  An allocation that is too
# large fails under either, as it does without a sanitizer.
set(LOWTIDE_SANITIZE_ENVIRONMENT
  "ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1"
  "UBSAN_OPTIONS=print_stacktrace=1"
  "TSAN_OPTIONS=${thread_options}")
