#include "testing/stream_history.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lowtide::device {
namespace {

std::size_t index_of(Stream stream) { return static_cast<std::size_t>(stream); }

void take_maximum(Clock& clock, const Clock& other) {
  for (std::size_t i = 0; i < kNumStreams; ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

}  // namespace

std::string_view stream_name(Stream stream) {
  switch (stream) {
    case Stream::compute:
      return "compute";
    case Stream::gather:
      return "gather";
    case Stream::reduce:
      return "reduce";
    case Stream::wire:
      return "wire";
    case Stream::offload:
      return "offload";
    case Stream::reload:
      return "reload";
  }
  LOWTIDE_INVARIANT(false, "a stream has a name");
}

std::string_view entry_kind_name(Entry::Kind kind) {
  switch (kind) {
    case Entry::Kind::mark:
      return "mark";
    case Entry::Kind::allocate:
      return "allocate";
    case Entry::Kind::release:
      return "release";
    case Entry::Kind::read:
      return "read";
    case Entry::Kind::write:
      return "write";
    case Entry::Kind::record:
      return "record";
    case Entry::Kind::wait:
      return "wait";
    case Entry::Kind::synchronize:
      return "synchronize";
  }
  LOWTIDE_INVARIANT(false, "an entry's kind has a name");
}

EntryId StreamHistory::append(Stream stream, Entry::Kind kind,
                              std::string name) {
  Clock& clock = clocks_[index_of(stream)];
  ++clock[index_of(stream)];
  log_.push_back({stream, kind, std::move(name), clock});
  return log_.size() - 1;
}

void StreamHistory::join(Stream stream, const Clock& clock) {
  take_maximum(clocks_[index_of(stream)], clock);
}

void StreamHistory::join_host(Stream stream) {
  const Clock reached = clock(stream);
  for (Clock& clock : clocks_) take_maximum(clock, reached);
  take_maximum(host_, reached);
}

const Clock& StreamHistory::clock(Stream stream) const {
  return clocks_[index_of(stream)];
}

bool StreamHistory::happens_before(EntryId first, EntryId second) const {
  const Entry& a = log_.at(first);
  return first != second &&
         log_.at(second).clock[index_of(a.stream)] >= a.position();
}

bool StreamHistory::happens_before_host(EntryId entry) const {
  const Entry& a = log_.at(entry);
  return host_[index_of(a.stream)] >= a.position();
}

}  // namespace lowtide::device
