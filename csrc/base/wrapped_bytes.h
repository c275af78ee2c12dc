// The bytes of torch's allocators within the DataPtrs that lowtide makes of
// them.
//
// [Note: Wrapped bytes]
// torch's allocator knows its own bytes by the deleter of their DataPtr.  Asked
// to keep others for a stream (Tensor.record_stream), it does nothing and says
// nothing: they would be somebody else's while that stream still reads them.
// What lowtide's storages show has deleters of lowtide's: of the ledger, of the
// stream that bytes go back to, of a part of a larger storage.  Each such kind
// says here what it has inside.
#pragma once

#include <c10/core/Allocator.h>

namespace lowtide::base {

// Makes known, for as long as the process lives, what a DataPtr with `deleter`
// has inside: `inside(context)`, null for nothing.  One object per kind, made
// when its library is loaded.
class Wrapping {
 public:
  using Inside = c10::DataPtr* (*)(void* context);
  Wrapping(c10::DeleterFnPtr deleter, Inside inside);
};

// The innermost; `bytes` itself if nothing is inside.
const c10::DataPtr& innermost(const c10::DataPtr& bytes);

}  // namespace lowtide::base
