// The rules an access to device memory keeps when several streams share one
// pool, checked against a StreamHistory:
//
//   allocation  a use on any stream comes after the allocation on compute
//   race        two uses of the same bytes, one of them a write, are ordered
//   release     every use comes before the release on compute, because the
//               pool hands the bytes to the next compute kernel
//   lifetime    nothing uses released bytes, or bytes nobody allocated
//
// Host bytes for copies are allocated and released by the host, which is
// ordered with every stream it has synchronized with.
//
// A broken rule becomes a sentence that names the bytes, the streams and the
// entries of the log.  Not thread-safe; ScriptedRuntime locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "testing/stream_history.h"

namespace lowtide::device {

class AccessChecker {
 public:
  // `history` outlives the checker.
  explicit AccessChecker(StreamHistory& history) : history_(history) {}

  // Bytes [begin, begin + bytes) are new.  What was known about the address
  // is forgotten: an allocator may reuse it.
  void allocated(const void* begin, std::size_t bytes, std::string name);
  void host_allocated(const void* begin, std::size_t bytes, std::string name);
  void describe(const void* begin, std::string name);
  void touched(Stream stream, const void* begin, std::size_t bytes,
               Access access, std::string name);
  // Returns the number of bytes released; 0 when none are live at `begin`.
  std::size_t released(const void* begin);

  void add_violation(std::string text);
  const std::vector<std::string>& violations() const { return violations_; }

 private:
  struct Use {
    std::uintptr_t begin;
    std::uintptr_t end;
    Access access;
    EntryId entry;
  };
  struct Region {
    std::uintptr_t end;
    std::int64_t id;  // counts allocations
    std::string name;
    EntryId allocation;
    bool host;
    EntryId release = 0;  // 0 while live: a release is never the first entry
    // Only uses that can still be part of a new violation, see `remember`.
    std::vector<Use> uses;
  };
  using Regions = std::map<std::uintptr_t, Region>;  // by begin, disjoint

  void add_region(const void* begin, std::size_t bytes, std::string name,
                  bool host);
  Regions::iterator region_of(std::uintptr_t address);
  void check_races(const Region& region, const Use& use);
  void remember(Region& region, const Use& use);
  std::string text(const Use& use) const;
  std::string text(EntryId entry) const;
  static std::string text(const Region& region);

  StreamHistory& history_;
  Regions regions_;
  std::int64_t num_allocations_ = 0;
  std::vector<std::string> violations_;
};

}  // namespace lowtide::device
