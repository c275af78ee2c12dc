#include "phantom/observer/assumptions.h"

#include <atomic>

namespace lowtide::dry {
namespace {

using Listener = void(const char*);

std::atomic<Listener*>& who_hears() {
  static std::atomic<Listener*> hears = nullptr;
  return hears;
}

}  // namespace

void assume(const char* what) {
  if (auto* const hear = who_hears().load()) hear(what);
}

}  // namespace lowtide::dry

extern "C" {

__attribute__((visibility("default"))) void lowtide_dry_hear_assumptions(
    void (*hear)(const char*)) {
  lowtide::dry::who_hears() = hear;
}

}  // extern "C"
