// One storage's bytes at one version, kept for backward: on the device, on the
// host, or both.
//
//   kept      the device's bytes are held
//   leaving   a copy to the host is on its way, the device's bytes still held
//   host      only the host's copy is held
//   back      copied back into a new buffer, on its way or there
//
// Streams: the copy out waits for an event recorded when the bytes were
// produced; compute waits for the copy before the device's bytes are let go;
// the copy back lands in memory of compute's pool and compute waits for it
// before it reads, and before that memory is let go.
//
// Thread-safe.  Destroying a stash gives everything back, wherever it is.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "activation/exposed_wait.h"
#include "device/runtime.h"
#include "memory/device_memory.h"
#include "memory/pinned_pool.h"

namespace lowtide::activation {

enum class Place : std::uint8_t { kept, leaving, host, back };

// Where stashes get their bytes from.
struct Memories {
  std::shared_ptr<memory::DeviceMemory> device;
  std::shared_ptr<memory::PinnedPool> host;
  std::shared_ptr<ExposedWait> waits = std::make_shared<ExposedWait>();
};

class Stash {
 public:
  // Holds `tensor`'s storage, a plain dense one on the runtime's device, under
  // its current version; `name` is for the ledgers.
  Stash(Memories memories, std::string name, const at::Tensor& tensor);
  ~Stash();
  Stash(const Stash&) = delete;
  Stash& operator=(const Stash&) = delete;

  const std::string& name() const { return name_; }
  std::int64_t num_bytes() const { return num_bytes_; }
  Place place() const;
  // Whether `tensor` shows the bytes this stash was made of.
  bool is_of(const at::Tensor& tensor) const;
  // Whether somebody wrote to them since.
  bool modified() const;

  // Issues the copy to the host behind `ready`.  Once; later calls do nothing.
  // Throws c10::Error when the host has no memory.
  void copy_out(const device::Event& ready);
  // Lets the device's bytes go: the stream that was compute's when the stash
  // was made, to whose pool they go back, waits for the copy out.  Does nothing
  // while no copy was issued.
  void let_go();
  // Issues the copy back, if only the host has the bytes.
  void fetch();
  // The bytes, for compute to read from now on; fetches them if need be.
  c10::Storage on_device();
  // Lets go of a buffer that was copied back; `on_device`'s storage stays valid
  // for its holders.
  void drop_fetched();

 private:
  device::Runtime& runtime() const { return memories_.device->runtime(); }
  void fetch_locked();
  void await_copy_back();

  const Memories memories_;
  const std::string name_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> identity_;
  const c10::VariableVersion counter_;
  const std::uint32_t version_;
  const std::int64_t num_bytes_;
  const c10::Stream home_;

  mutable std::mutex mutex_;
  c10::Storage source_;
  memory::HostSlot slot_;
  device::Event copied_out_;
  c10::Storage fetched_;
  device::Event copied_back_;
  bool awaited_ = false;  // compute waits for copied_back_
};

}  // namespace lowtide::activation
