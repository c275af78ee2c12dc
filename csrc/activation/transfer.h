// When stashes leave the device and when they come back.
//
// Every forward of a region opens a Batch: the values it sends to the host.
// Batches are numbered in the order of their forwards.  While regions run
// forward, the device holds what the newest 1 + prefetch + keep_last batches
// send; the newest keep_last of them are not copied at all.  In backward the
// batch in use and the `prefetch` ones before it are on the device.
//
// Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "activation/stash.h"
#include "base/storage_map.h"
#include "device/runtime.h"

namespace lowtide::activation {

struct Window {
  std::int64_t prefetch = 1;
  std::int64_t keep_last = 0;
};

class Transfers;

// Told once what became of a value: `sent` when its copy is issued, otherwise
// when its batch dies.  Called under Transfers' lock.
using Outcome = std::function<void(bool sent)>;

// What one forward of a region sends to the host.  Its owner keeps it as long
// as backward may need it.
class Batch {
 public:
  // Use Transfers::open.
  Batch(std::weak_ptr<Transfers> transfers, std::int64_t number, Window window,
        std::string who)
      : transfers_(std::move(transfers)),
        number_(number),
        window_(window),
        who_(std::move(who)) {}
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

 private:
  friend class Transfers;
  struct Value {
    std::shared_ptr<Stash> stash;
    device::Event ready;
    std::vector<Outcome> outcomes;  // one for each name
  };

  const std::weak_ptr<Transfers> transfers_;
  const std::int64_t number_;
  const Window window_;
  const std::string who_;
  std::vector<Value> values_;
  bool sent_ = false;  // values are copied as they come
};

class Transfers : public std::enable_shared_from_this<Transfers> {
 public:
  explicit Transfers(Memories memories);

  const Memories& memories() const { return memories_; }

  // The stash of `tensor`'s bytes: one that is alive, or a new one that keeps
  // them.  `name` is for the ledgers of a new one.
  std::shared_ptr<Stash> stash(const at::Tensor& tensor, std::string_view name);

  // The forward of region `who` begins: older batches are sent and let go as
  // their windows say.
  std::shared_ptr<Batch> open(Window window, std::string who);
  // `stash` is part of `batch`; its bytes are complete at `ready`.
  void add(Batch& batch, std::shared_ptr<Stash> stash, device::Event ready,
           Outcome outcome);

  // Backward is about to use `batch`: it and, behind it, the `prefetch` batches
  // before it start to come back.  Call it before anything is enqueued that
  // they shall overlap with.
  void begin_use(Batch& batch);
  // What came back for `batch` is let go by the stashes.
  void end_use(Batch& batch);
  // Nothing that was prefetched is used any more in this backward.
  void end_backward();

  struct Figures {
    std::int64_t leaving_peak = 0;     // device bytes whose copy out was issued
    std::int64_t device_peak = 0;      // device bytes of all values in batches
    std::string peak_moment;           // "forward of layers.3"
    std::int64_t fetched_inline = 0;   // stashes nobody had prefetched
    std::int64_t fetched_ahead = 0;    // stashes
    std::int64_t host_ns_copying = 0;  // the host's time in issuing copies
    // Compute's time in waiting for copies, as far as it has come; nothing on
    // devices without a clock.
    std::optional<std::int64_t> exposed_ns;
  };
  Figures figures() const;
  void reset_figures();

 private:
  friend class Batch;
  void forget(Batch& batch);
  // Under the lock.
  void send(Batch& batch);
  static void send(Batch::Value& value);
  void count(const char* phase, const Batch& batch);
  void fetch(Batch& batch, std::int64_t& counter);

  const Memories memories_;
  mutable std::mutex mutex_;
  // Batches leave these lists, under the lock, before they die.
  std::int64_t next_number_ = 0;
  std::map<std::int64_t, Batch*> batches_;  // by number
  std::vector<Batch*> present_;  // not yet let go since their forward
  std::vector<Batch*> fetched_;  // with bytes that came back
  base::StorageMap<std::weak_ptr<Stash>> stashes_;
  Figures figures_;
};

}  // namespace lowtide::activation
