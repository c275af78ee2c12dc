// What torch's caching allocator was asked on one device, in order, with what
// decides when its blocks are free again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace lowtide::dry {

// As lowtide/planning/history.py reads it.
struct JournalEntry {
  enum Kind : std::int64_t {
    kAllocate,    // address, bytes asked for, stream
    kFree,        // address, bytes asked for, stream
    kUsed,        // address: by that stream too, when it was freed
    kSegment,     // bytes that the allocator took, or less than 0: gave back
    kWaitStream,  // the host did
    kWaitDevice,
  };
  std::int64_t kind = 0;
  std::int64_t address = 0;
  std::int64_t bytes = 0;
  std::int64_t stream = 0;
  std::int64_t block = 0;  // kAllocate: bytes handed out; 0: not known
  std::int64_t pool = 0;   // kAllocate: 0: not of a pool apart, a graph's or
                           // one that the program made
};

// Hears of an allocation on the thread that made it, soon behind it: where no
// lock is held, and with the interpreter.
using AllocationListener = void (*)(std::int64_t address, const char* name);

// Thread-safe.
class AllocationJournal {
 public:
  explicit AllocationJournal(int device) : device_(device) {}

  int device() const { return device_; }

  // `allocated`: bytes handed out before an allocation or segment, behind a
  // free.
  void allocated(JournalEntry entry, std::int64_t allocated);
  void segment(JournalEntry entry, std::int64_t allocated);
  // A block that other streams used is freed behind an event of each, which the
  // allocator records between asking for the free and completing it.  What the
  // program records before the next call is taken for one, too.
  void freed(JournalEntry entry, std::int64_t allocated);
  void recorded(std::int64_t stream);
  // The free that the calling thread asked for last is complete.
  static void completed();
  void waited(JournalEntry entry);
  void end(std::int64_t allocated);

  std::int64_t num_frees() const;
  std::vector<JournalEntry> entries() const;

 private:
  void add(JournalEntry entry);
  // What was handed out before is what the last allocation left.
  void settle(std::int64_t allocated);

  const int device_;
  mutable std::mutex mutex_;
  std::vector<JournalEntry> entries_;
  std::int64_t num_frees_ = 0;
  std::unordered_map<std::int64_t, std::int64_t> blocks_;  // by address
  std::int64_t total_ = 0;                                 // of blocks_
  std::size_t open_ = kNone;  // the last allocation, whose block is not known
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
};

}  // namespace lowtide::dry
