#include "base/wrapped_bytes.h"

#include "base/by_deleter.h"

namespace lowtide::base {
namespace {

ByDeleter<Wrapping::Inside>& wrappings() {
  static ByDeleter<Wrapping::Inside> wrappings;
  return wrappings;
}

c10::DataPtr* inside_of(const c10::DataPtr& bytes) {
  const auto* const inside = wrappings().find(bytes);
  return inside == nullptr ? nullptr : (*inside)(bytes.get_context());
}

}  // namespace

Wrapping::Wrapping(c10::DeleterFnPtr deleter, Inside inside) {
  wrappings().add(deleter, inside);
}

const c10::DataPtr& innermost(const c10::DataPtr& bytes) {
  const c10::DataPtr* found = &bytes;
  while (const c10::DataPtr* const inside = inside_of(*found)) found = inside;
  return *found;
}

}  // namespace lowtide::base
