// What the driver keeps stays until the process is gone: torch's libraries call
// it from destructors of their own statics, in whichever order those run.
// Destructors of this library's statics are registered here, that is nowhere.
extern "C" __attribute__((visibility("hidden"))) int __cxa_atexit(
    void (*)(void*), void*, void*) {
  return 0;
}
