#include "phantom/observer/assumptions.h"

#include <atomic>

namespace lowtide::dry {
namespace {

using Listener = void(const char*);

std::atomic<Listener*>& listener() {
  static std::atomic<Listener*> listener = nullptr;
  return listener;
}

}  // namespace

void assume(const char* what) {
  if (auto* const hear = listener().load()) hear(what);
}

}  // namespace lowtide::dry

extern "C" {

__attribute__((visibility("default"))) void lowtide_dry_hear_assumptions(
    void (*hear)(const char*)) {
  lowtide::dry::listener() = hear;
}

}  // extern "C"
