// torch's allocator for phantom tensors: the model's blocks as c10::DataPtr.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace lowtide::phantom {

// The same object for every call; owned by the library.  Its allocations come
// from the pool of the stream that is current on the calling thread.  Throws
// c10::OutOfMemoryError, which Python sees as torch.OutOfMemoryError.
c10::DeviceAllocator& device_allocator();

// The block behind `data` is also used on `stream`; nothing for memory that
// did not come from `device_allocator`.
void record_stream(const c10::DataPtr& data, c10::Stream stream);

}  // namespace lowtide::phantom
