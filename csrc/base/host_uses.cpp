#include "base/host_uses.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/wrapped_bytes.h"

namespace lowtide::base {
namespace {

using Lessor = std::pair<c10::DeleterFnPtr, HostUses::Used>;

std::vector<Lessor>& lessors() {
  static std::vector<Lessor> lessors;
  return lessors;
}

}  // namespace

HostUses::HostUses(c10::DeleterFnPtr deleter, Used used) {
  lessors().emplace_back(deleter, used);
}

void note_use(const c10::DataPtr& bytes, c10::Stream stream) {
  const c10::DataPtr& inner = innermost(bytes);
  const auto lessor =
      std::ranges::find(lessors(), inner.get_deleter(), &Lessor::first);
  if (lessor != lessors().end()) lessor->second(inner.get_context(), stream);
}

}  // namespace lowtide::base
