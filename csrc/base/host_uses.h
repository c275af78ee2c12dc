// Which streams torch's own copies use host bytes of lowtide's on.
//
// [Note: Host bytes in torch's copies]
// A copy that does not block the host goes on reading or writing page-locked
// bytes when it has returned.  torch's allocator of such bytes is told the
// stream, and gives bytes that were dropped to nobody before it has come so
// far; it passes bytes over that are not its own.  Those that lowtide leases
// say here whom to tell.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace lowtide::base {

// Makes known, for as long as the process lives, whom to tell of uses of a
// DataPtr with `deleter`: `used(context, stream)`.  One object per kind, made
// when its library is loaded.
class HostUses {
 public:
  using Used = void (*)(void* context, c10::Stream stream);
  HostUses(c10::DeleterFnPtr deleter, Used used);
};

// `stream` has just been given work that reads or writes `bytes`, or those that
// they wrap; nothing happens if they are of no kind.
void note_use(const c10::DataPtr& bytes, c10::Stream stream);

}  // namespace lowtide::base
