// <dlfcn.h>, whose functions glibc 2.34 moved from libdl into libc: programs
// that are built with it would not load under an older one, in which torch's
// wheels run (manylinux_2_28).  Their former versions are the same functions.
#pragma once

#include <dlfcn.h>

#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
#endif
