// What programs and tests ask the dry driver itself (lowtide/phantom/dry.py).
#include <cuda_runtime_api.h>

#include <cstdint>

#include "phantom/driver/capture.h"
#include "phantom/driver/device.h"
#include "phantom/driver/kernels.h"
#include "phantom/driver/listener.h"
#include "phantom/driver/order.h"

#define LOWTIDE_DRY_API __attribute__((visibility("default")))

using namespace lowtide::dry;

extern "C" {

// Times that the host waited for a device.
LOWTIDE_DRY_API std::int64_t lowtide_dry_host_waits() { return host_waits(); }
LOWTIDE_DRY_API std::int64_t lowtide_dry_launches() { return launches(); }
// Events so far: whoever uses theirs again makes no more.
LOWTIDE_DRY_API std::int64_t lowtide_dry_events_made() { return events_made(); }
// Work beside a capture that is missing from its graph.
LOWTIDE_DRY_API std::int64_t lowtide_dry_stray() { return capture().stray(); }
// Collectives so far that `stream` does not come after.
LOWTIDE_DRY_API std::int64_t lowtide_dry_unseen_collectives(
    cudaStream_t stream) {
  return order().unseen(stream);
}
// Functions that hear of events and waits (listener.h); null for nobody.
LOWTIDE_DRY_API void lowtide_dry_listen(Listener::Recorded recorded,
                                        Listener::Waited waited) {
  listener().recorded = recorded;
  listener().waited = waited;
}
// Instead of LOWTIDE_DRY_LIMIT and LOWTIDE_DRY_EVENTS, before the device is
// used.
LOWTIDE_DRY_API void lowtide_dry_set_bounds(int index, std::int64_t limit,
                                            int immediate) {
  device(index).memory.allow(static_cast<std::size_t>(limit));
  device(index).completion.set_immediate(immediate != 0);
}
// Whatever the current device was told counts as waited for, and no time
// passes.
LOWTIDE_DRY_API void lowtide_dry_settle() {
  device(current_device()).completion.wait_for_device();
}
// Bytes of a device: what cudaMemGetInfo calls used, at most so far.
LOWTIDE_DRY_API std::int64_t lowtide_dry_peak_memory(int index) {
  return static_cast<std::int64_t>(device(index).memory.peak());
}
LOWTIDE_DRY_API std::int64_t lowtide_dry_peak_pinned() {
  return static_cast<std::int64_t>(pinned().peak());
}
// Whether a range was made by the host.
LOWTIDE_DRY_API int lowtide_dry_known(const void* first, std::int64_t bytes) {
  return kept().known_as_whole(reinterpret_cast<Address>(first),
                               static_cast<std::size_t>(bytes));
}
// The device whose memory it is, or -1.
LOWTIDE_DRY_API int lowtide_dry_device_of(const void* address) {
  return device_of(address).value_or(-1);
}
// The range has other contents now (csrc/phantom/observer).
LOWTIDE_DRY_API void lowtide_dry_forget(const void* first, std::int64_t bytes) {
  if (!device_of(first) || kept().total() == 0) return;
  kept().forget(reinterpret_cast<Address>(first),
                static_cast<std::size_t>(bytes));
}
// Between host and device, as far as there are bytes.
LOWTIDE_DRY_API void lowtide_dry_copy(void* to, const void* from,
                                      std::int64_t bytes) {
  copy_bytes(to, from, static_cast<std::size_t>(bytes));
}
LOWTIDE_DRY_API void lowtide_dry_write_zeros(void* first, std::int64_t bytes) {
  kept().fill(reinterpret_cast<Address>(first), 0,
              static_cast<std::size_t>(bytes));
}
// The bits that reads of up to 8 bytes yield in the calling thread, until
// lowtide_dry_no_answer.
LOWTIDE_DRY_API void lowtide_dry_answer(std::int64_t bits) { set_answer(bits); }
LOWTIDE_DRY_API void lowtide_dry_no_answer() { set_answer(std::nullopt); }

}  // extern "C"
