#include "phantom/driver/missing.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <string>

namespace {

std::mutex mutex;

std::set<std::string>& names() {
  static std::set<std::string> names;
  return names;
}

}  // namespace

extern "C" {

int lowtide_dry_missing(const char* name, int status) {
  const std::lock_guard lock(mutex);
  if (names().insert(name).second) {
    std::fprintf(
        stderr,
        "lowtide: phantom: expected functions that the dry driver has, "
        "got a call of %s. Avoid what calls it, or report its name.\n",
        name);
  }
  return status;
}

// A name a line; valid until the next call.
__attribute__((visibility("default"))) const char* lowtide_dry_missing_names() {
  const std::lock_guard lock(mutex);
  static std::string lines;
  lines.clear();
  for (const auto& name : names()) lines += name + "\n";
  return lines.c_str();
}

}  // extern "C"
