// Host bytes of what is offloaded for good, parameters and reduced gradients,
// and their copies to and from the device.
//
// [Note: Copies and the host]
// What is on the host is read and written by whoever likes, without a stream:
// by an optimizer, by a state dict.  No event orders that behind a copy.  So
// the host waits, for the copies alone, where a program goes on from one part
// of a step to the next: when the root's forward returns and when a backward is
// over.  Bytes that are given back while a copy may use them wait for that,
// too.  Those that copies of torch's may use, on whichever stream ([Note: Host
// bytes in torch's copies]), serve again for copies to the host, which run
// behind those.
//
// Thread-safe.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/host_uses.h"
#include "device/runtime.h"
#include "memory/ledger.h"
#include "memory/pinned_pool.h"

namespace lowtide::memory {

class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  // `page_locked`: as long as the pool has such bytes; else ordinary ones,
  // whose copies block the host.
  HostMemory(std::shared_ptr<device::Runtime> runtime,
             std::shared_ptr<PinnedPool> pool, bool page_locked);
  // Waits for the copies.
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // `num_bytes` of uninitialised memory, entered in the pool's ledger; zero
  // bytes give a null DataPtr.  No copy uses those of parameters any more,
  // which the host writes first; copies to the host may use others.
  c10::DataPtr lease(Category category, std::string_view name,
                     std::int64_t num_bytes);
  // Whether `bytes` came from here, from whichever.
  static bool leased(const c10::DataPtr& bytes);

  // Copies on `reload`, behind what compute has enqueued; the event is behind
  // the copy.  Throws lowtide::Error inside a graph capture.
  device::Event to_device(void* to, const void* from, std::int64_t num_bytes);
  // The same on `offload`, behind what the current stream has enqueued.
  device::Event to_host(void* to, const void* from, std::int64_t num_bytes);

  // Blocks the host until the copies so far have run.
  void wait();

 private:
  struct Lease;
  static void release(void* context);
  static void use(void* context, c10::Stream stream);
  static const base::HostUses kLeases;
  void give_back(Lease lease);
  void make_ready(Category category);
  std::vector<HostSlot> follow_users();
  device::Event copy(device::Stream behind, device::Stream on, void* to,
                     const void* from, std::int64_t num_bytes,
                     device::Copy direction);

  const std::shared_ptr<device::Runtime> runtime_;
  const std::shared_ptr<PinnedPool> pool_;
  const bool page_locked_;
  // Held while copies are issued and waited for: a thread that finds none must
  // not go on while another one waits for them.
  std::mutex mutex_;
  bool reads_ = false;                // copies to the device may run
  bool writes_ = false;               // copies to the host may run
  std::vector<HostSlot> given_back_;  // while copies might use them
  // Torch's copies of bytes given back may run on `users_`.
  std::vector<c10::Stream> users_;
  std::vector<HostSlot> left_to_users_;  // no other copy uses them
  bool follows_ = false;  // `offload` is behind such copies, the host is not
};

}  // namespace lowtide::memory
