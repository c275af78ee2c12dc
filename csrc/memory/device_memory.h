// Where every buffer of lowtide's comes from: bytes of a Runtime, entered in a
// Ledger for as long as anything refers to them.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "device/runtime.h"
#include "memory/ledger.h"

namespace lowtide::memory {

class DeviceMemory {
 public:
  DeviceMemory(std::shared_ptr<device::Runtime> runtime,
               std::shared_ptr<Ledger> ledger);

  // `bytes` of uninitialised memory from the compute stream's pool; zero bytes
  // give a null DataPtr on the runtime's device and no ledger entry.  The
  // ledger entry and the bytes live until the returned DataPtr (or the storage
  // it was moved into) dies; runtime and ledger are kept alive until then.
  // Out of memory: the device's c10::Error passes through, with what was wanted
  // and what to do; the ledger is unchanged.
  c10::DataPtr lease(Category category, std::string_view name,
                     std::int64_t bytes);

  // What was asked for where `bytes` came from; nothing for bytes of others.
  struct Asked {
    Category category;
    std::string name;
  };
  static std::optional<Asked> asked_for(const c10::DataPtr& bytes);

  device::Runtime& runtime() const { return *runtime_; }
  const std::shared_ptr<device::Runtime>& shared_runtime() const {
    return runtime_;
  }
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }

  // Fault injection: the next lease of `category` under `name` throws
  // c10::OutOfMemoryError once.  This is how recovery from out-of-memory is
  // tested at every point of a step.
  void fail_next_lease(Category category, std::string name);

  // Debugging: fills every lease with NaN (0xFF bytes) when it is made and
  // again before its bytes go back, so that a read of bytes nobody wrote, or of
  // freed ones, shows in the loss.  Costs a memset each.
  void set_poison(bool poison) { poison_ = poison; }

 private:
  struct Fault {
    Category category;
    std::string name;
  };
  std::shared_ptr<device::Runtime> runtime_;
  std::shared_ptr<Ledger> ledger_;
  std::mutex mutex_;
  std::optional<Fault> fault_;
  std::atomic<bool> poison_{false};
};

}  // namespace lowtide::memory
