// Host bytes that device memory is copied to and back from, page-locked where
// the cap and the system allow it.
//
// A slot has exactly the size asked for and is registered once: it goes back to
// the pool and serves the next request of that size.  Beyond the cap slots are
// ordinary (pageable) memory, whose copies block the host; the first one is
// reported by a warning.
//
// [Note: Slots in graphs] A CUDA graph copies to and from the slots of its
// capture whenever it runs again, be it between the forward and the backward of
// another step: what a capture has taken serves captures only, as long as the
// pool lives, which is as long as the model.  No event leads into a capture or
// from one into another: compute orders the uses, which has waited for the last
// one when the next begins.
//
// Thread-safe.  A slot may be given back on any thread.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "device/runtime.h"
#include "memory/ledger.h"

namespace lowtide::memory {

class PinnedPool;

// A slot's bytes, and who used them last.  Those of a pageable slot are not
// kept.
struct PinnedBytes {
  c10::DataPtr data = {};
  device::Event last_use = {};
  std::uint64_t capture = 0;  // that of the last use
  bool in_graph = false;      // taken by a capture, for good
};

// Move-only; its bytes go back to the pool when it dies.
class HostSlot {
 public:
  HostSlot() = default;
  HostSlot(HostSlot&&) = default;
  HostSlot& operator=(HostSlot&& other);
  ~HostSlot();

  explicit operator bool() const { return pool_ != nullptr; }
  void* data() const { return bytes_.data.get(); }
  std::int64_t num_bytes() const { return num_bytes_; }

  // The last copy from these bytes, recorded now.  Compute waits for it before
  // the slot is given back.
  void set_last_use(device::Event copied);
  // For `stream`, which writes these bytes next; writes themselves come in the
  // order of the offload stream.
  void wait_for_last_use(device::Stream stream);

 private:
  friend class PinnedPool;
  void give_back();

  std::shared_ptr<PinnedPool> pool_;
  PinnedBytes bytes_;
  std::int64_t num_bytes_ = 0;
  Category category_ = Category::activations;
  std::string name_;
  bool pinned_ = false;
};

class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  // At most `cap_bytes` are page-locked at once.  `ledger` counts the slots in
  // use, by name; it is not the device's.  `holds`: what is in the slots, for
  // messages.
  PinnedPool(std::shared_ptr<device::Runtime> runtime,
             std::shared_ptr<Ledger> ledger, std::int64_t cap_bytes,
             std::string holds = "activations");
  // Waits for the copies.
  ~PinnedPool();

  // `num_bytes` > 0.  Throws c10::Error, with what was wanted and what to do,
  // when the host has none left, and lowtide::Error where a graph capture would
  // need pageable ones.  Without `page_locked` they are pageable in any case,
  // and nobody is told.
  HostSlot acquire(std::string_view name, std::int64_t num_bytes,
                   Category category = Category::activations,
                   bool page_locked = true);

  struct Figures {
    std::int64_t pinned_bytes = 0;         // registered now, in use or not
    std::int64_t num_registrations = 0;    // since construction
    std::int64_t registration_ns = 0;      // what they took together
    std::int64_t pageable_bytes = 0;       // in use now
    std::int64_t peak_pageable_bytes = 0;  // since construction
  };
  Figures figures() const;
  std::int64_t cap_bytes() const { return cap_bytes_; }
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }

 private:
  friend class HostSlot;
  using BySize = std::map<std::int64_t, std::vector<PinnedBytes>>;
  // All under the lock.
  PinnedBytes take_pinned(std::int64_t num_bytes);
  static std::optional<PinnedBytes> take_from(BySize& slots,
                                              std::int64_t num_bytes);
  void make_room();
  PinnedBytes register_bytes(std::int64_t num_bytes);

  PinnedBytes pageable(std::int64_t num_bytes, bool wanted);
  std::string shortage(std::int64_t num_bytes, const std::string& remedy) const;
  void give_back(HostSlot& slot);
  void synchronize();

  const std::shared_ptr<device::Runtime> runtime_;
  const std::shared_ptr<Ledger> ledger_;
  const std::int64_t cap_bytes_;
  const std::string holds_;
  mutable std::mutex mutex_;
  BySize free_;
  BySize free_in_graphs_;
  Figures figures_;
  bool reported_ = false;
};

}  // namespace lowtide::memory
