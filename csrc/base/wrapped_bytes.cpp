#include "base/wrapped_bytes.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace lowtide::base {
namespace {

using Kind = std::pair<c10::DeleterFnPtr, Wrapping::Inside>;

std::vector<Kind>& kinds() {
  static std::vector<Kind> kinds;
  return kinds;
}

c10::DataPtr* inside_of(const c10::DataPtr& bytes) {
  const auto kind =
      std::ranges::find(kinds(), bytes.get_deleter(), &Kind::first);
  return kind == kinds().end() ? nullptr : kind->second(bytes.get_context());
}

}  // namespace

Wrapping::Wrapping(c10::DeleterFnPtr deleter, Inside inside) {
  kinds().emplace_back(deleter, inside);
}

const c10::DataPtr& innermost(const c10::DataPtr& bytes) {
  const c10::DataPtr* found = &bytes;
  while (const c10::DataPtr* const inside = inside_of(*found)) found = inside;
  return *found;
}

}  // namespace lowtide::base
