#include "base/host_uses.h"

#include "base/by_deleter.h"
#include "base/wrapped_bytes.h"

namespace lowtide::base {
namespace {

ByDeleter<HostUses::Used>& lessors() {
  static ByDeleter<HostUses::Used> lessors;
  return lessors;
}

}  // namespace

HostUses::HostUses(c10::DeleterFnPtr deleter, Used used) {
  lessors().add(deleter, used);
}

void note_use(const c10::DataPtr& bytes, c10::Stream stream) {
  const c10::DataPtr& inner = innermost(bytes);
  if (const auto* const used = lessors().find(inner)) {
    (*used)(inner.get_context(), stream);
  }
}

}  // namespace lowtide::base
