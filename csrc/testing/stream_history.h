// What was enqueued on each stream, in which order, and what must have
// happened before what.
//
// [Note: Vector clocks] Every stream counts its own entries; its clock says how
// many entries of each stream lie before its next one.  Recording an event
// copies the clock, waiting for it takes the maximum.  Entry A happens before
// entry B exactly if B's clock has reached A's position on A's stream: a chain
// of in-order streams and event waits leads from A to B.
//
// Not thread-safe; ScriptedRuntime locks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "device/runtime.h"

namespace lowtide::device {

// Entries of each stream, indexed by static_cast<size_t>(stream).
using Clock = std::array<std::int64_t, kNumStreams>;

using EntryId = std::size_t;  // position in the log

struct Entry {
  enum class Kind : std::uint8_t {
    mark,         // a kernel of the test's
    allocate,     // always on compute
    release,      // always on compute
    read,         // declared by Runtime::touches
    write,        // declared by Runtime::touches
    record,       // of an event
    wait,         // for an event
    synchronize,  // the host waited for the stream
  };
  Stream stream;
  Kind kind;
  std::string name;
  Clock clock;  // including the entry itself

  std::int64_t position() const {
    return clock[static_cast<std::size_t>(stream)];
  }
};

std::string_view stream_name(Stream stream);         // "compute", ...
std::string_view entry_kind_name(Entry::Kind kind);  // "mark", ...

class StreamHistory {
 public:
  EntryId append(Stream stream, Entry::Kind kind, std::string name);

  // Everything enqueued on `stream` from now on comes after `clock`.
  void join(Stream stream, const Clock& clock);
  // Everything enqueued on any stream from now on comes after `stream`'s
  // entries so far.
  void join_host(Stream stream);

  // Of the last entry on `stream`, waits included.
  const Clock& clock(Stream stream) const;

  bool happens_before(EntryId first, EntryId second) const;
  // Whether the host has waited for what `entry` stands for.
  bool happens_before_host(EntryId entry) const;

  const std::vector<Entry>& log() const { return log_; }

 private:
  std::array<Clock, kNumStreams> clocks_{};
  Clock host_{};
  std::vector<Entry> log_;
};

}  // namespace lowtide::device
