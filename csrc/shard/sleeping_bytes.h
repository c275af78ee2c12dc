// Bytes that wait on the host while the tensors that show them stay.
//
// [Note: Sleeping bytes]
// Between two steps a model may lend the device's memory to another program.
// Its parameters, gradients and optimizer states are copied to host slots, and
// every storage that they are on loses its bytes ([Note: Reads of what was
// given back]): tensors, views and DTensors, in whatever unit, optimizer or
// state dict, stay the objects that they are.  Waking gives each storage bytes
// again, at another address.
//
// What is dropped has no copy: waking gives its storages zeros, for somebody to
// write.
//
// What was allocated at once wakes at once: storages within another, as a
// unit's shards are within its master, find their places in it again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory/device_memory.h"
#include "memory/pinned_pool.h"

namespace lowtide::shard {

// Threads: one at a time, between steps.
class SleepingBytes {
 public:
  struct Named {
    at::Tensor tensor;
    std::string name;
  };

  // Copies on `offload`, waits, and gives the bytes back, all of a storage that
  // any of `tensors` shows a part of; without `host`, drops them.  Left out are
  // tensors on other devices than `memory`'s, offloaded, without bytes, and
  // asleep.  Nothing has changed if it throws: InvalidArgument for bytes that
  // neither torch nor lowtide allocated or that another process has; the host
  // has no memory; a graph is being captured.
  SleepingBytes(const std::vector<Named>& tensors,
                std::shared_ptr<memory::DeviceMemory> memory,
                const std::shared_ptr<memory::PinnedPool>& host);
  SleepingBytes(const SleepingBytes&) = delete;
  SleepingBytes& operator=(const SleepingBytes&) = delete;

  // Copies back on `reload`, behind which compute continues, or fills what was
  // dropped with zeros; what nobody holds any more stays away.  All still sleep
  // if it throws: no memory.
  void wake();

  std::int64_t bytes() const { return bytes_; }
  bool dropped() const { return dropped_; }
  // Whether the storage of `tensor` is one of those that sleep.
  bool holds(const at::Tensor& tensor) const;

 private:
  struct Shown {
    c10::Storage storage;
    std::string name;
    std::int64_t offset;  // in the block
    std::int64_t bytes;
    std::optional<std::string> read_error;  // as it was
  };
  // What was allocated at once; `shown` begins with all of it.
  struct Block {
    std::vector<Shown> shown;
    std::optional<memory::DeviceMemory::Asked> asked;
    c10::Allocator* allocator = nullptr;  // where lowtide was not asked
    std::size_t slot = 0;
    std::int64_t offset = 0;  // in the slot
  };

  void add(const Named& named);
  bool has_bytes(const c10::Storage& storage) const;
  void show(Block& block, const c10::Storage& storage, const std::string& name);
  void hide(Shown& shown) const;
  static bool needed(const Block& block);
  void acquire(memory::PinnedPool& host);
  void* host_bytes(const Block& block) const;
  c10::DataPtr allocate(const Block& block) const;

  std::shared_ptr<memory::DeviceMemory> memory_;
  std::vector<Block> blocks_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> block_of_;
  std::vector<memory::HostSlot> slots_;
  std::int64_t bytes_ = 0;
  bool dropped_;
};

}  // namespace lowtide::shard
