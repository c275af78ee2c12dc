#include "testing/scripted_runtime.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "testing/access_checker.h"

namespace lowtide::device {
namespace {

constexpr unsigned char kPoison = 0xFF;

// What an Event points to.
struct Recorded {
  Clock clock;
  std::uint64_t capture;
};

thread_local std::string current_label;

Error violation_error(const std::vector<std::string>& violations) {
  std::string list;
  for (const std::string& violation : violations) list += "\n  " + violation;
  return Error(base::error_text(
      "scripted runtime", "every access ordered by events",
      base::concat(violations.size(), " broken rule(s):", list, "\n"),
      "Record an event behind the work that must come first and make the "
      "other stream wait for it"));
}

}  // namespace

class ScriptedRuntime::State {
 public:
  explicit State(const Options& options) : options_(options) {}

  // What the DataPtr of an allocation owns.
  struct Allocation {
    std::shared_ptr<State> state;
    c10::DataPtr bytes;
    std::size_t num_bytes;
  };

  static void release(void* context) {
    const UnobservedAllocations unobserved;
    const std::unique_ptr<Allocation> allocation(
        static_cast<Allocation*>(context));
    const std::lock_guard lock(allocation->state->mutex_);
    allocation->state->checker_.released(allocation->bytes.get());
    allocation->state->quarantine(std::move(allocation->bytes),
                                  allocation->num_bytes);
  }

  // Runs `action(history, checker)` under the lock and throws what it broke.
  template <typename Action>
  auto step(Action&& action) {
    const std::lock_guard lock(mutex_);
    const std::size_t before = checker_.violations().size();
    auto result = action(history_, checker_);
    const auto& all = checker_.violations();
    if (options_.throw_on_violation && all.size() > before) {
      throw violation_error({all.begin() + before, all.end()});
    }
    return result;
  }

  template <typename Query>
  auto query(Query&& query) {
    const std::lock_guard lock(mutex_);
    return query(history_);
  }

  std::vector<std::string> violations() {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> all = checker_.violations();
    for (const Freed& freed : quarantine_) {
      if (!intact(freed)) all.push_back(overwritten(freed));
    }
    return all;
  }

  // For torch's own memory, which goes back to its allocator right away.
  void torch_allocation(void* begin, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > 0) {
      const auto size = static_cast<std::size_t>(bytes);
      checker_.allocated(begin, size, "torch");
      std::memset(begin, kPoison, size);
    } else if (const std::size_t size = checker_.released(begin)) {
      std::memset(begin, kPoison, size);
    }
  }

 private:
  struct Freed {
    c10::DataPtr bytes;
    std::size_t num_bytes;
  };

  void quarantine(c10::DataPtr bytes, std::size_t num_bytes) {
    std::memset(bytes.mutable_get(), kPoison, num_bytes);
    quarantine_.push_back({std::move(bytes), num_bytes});
    quarantined_ += num_bytes;
    while (quarantined_ > options_.quarantine_bytes) {
      const Freed& oldest = quarantine_.front();
      if (!intact(oldest)) checker_.add_violation(overwritten(oldest));
      quarantined_ -= oldest.num_bytes;
      quarantine_.pop_front();
    }
  }

  static bool intact(const Freed& freed) {
    const auto* begin = static_cast<const unsigned char*>(freed.bytes.get());
    return std::all_of(begin, begin + freed.num_bytes,
                       [](unsigned char byte) { return byte == kPoison; });
  }

  static std::string overwritten(const Freed& freed) {
    return base::concat("an undeclared write changed ", freed.num_bytes,
                        " released bytes");
  }

  const Options options_;
  std::mutex mutex_;
  StreamHistory history_;
  AccessChecker checker_{history_};
  std::deque<Freed> quarantine_;
  std::size_t quarantined_ = 0;
};

ScriptedRuntime::ScriptedRuntime(const Options& options)
    : state_(std::make_shared<State>(options)) {}

ScriptedRuntime::~ScriptedRuntime() = default;

c10::DataPtr ScriptedRuntime::allocate(std::size_t bytes) {
  const UnobservedAllocations unobserved;
  c10::DataPtr data = CpuRuntime::allocate(bytes);
  if (bytes == 0) return data;
  void* const begin = data.mutable_get();
  std::memset(begin, kPoison, bytes);
  auto allocation = std::make_unique<State::Allocation>(
      State::Allocation{state_, std::move(data), bytes});
  adopt(begin, bytes, current_label);
  return {begin, allocation.release(), &State::release, device()};
}

c10::DataPtr ScriptedRuntime::allocate_pinned(std::size_t bytes) {
  c10::DataPtr data = CpuRuntime::allocate_pinned(bytes);
  if (bytes == 0) return data;
  void* const begin = data.mutable_get();
  std::memset(begin, kPoison, bytes);
  state_->step([&](StreamHistory&, AccessChecker& checker) {
    checker.host_allocated(begin, bytes, "pinned");
    return 0;
  });
  auto allocation = std::make_unique<State::Allocation>(
      State::Allocation{state_, std::move(data), bytes});
  return {begin, allocation.release(), &State::release, device()};
}

void ScriptedRuntime::copy(Stream stream, void* to, const void* from,
                           std::size_t bytes, Copy direction) {
  touches(stream, from, bytes, Access::read);
  touches(stream, to, bytes, Access::write);
  CpuRuntime::copy(stream, to, from, bytes, direction);
}

Event ScriptedRuntime::record(Stream stream) {
  return state_->step([&](StreamHistory& history, AccessChecker&) {
    history.append(stream, Entry::Kind::record, current_label);
    return Event(
        std::make_shared<Recorded>(Recorded{history.clock(stream), capture_}));
  });
}

void ScriptedRuntime::wait(Stream stream, const Event& event) {
  if (event.empty()) return;
  const auto& point = *static_cast<const Recorded*>(event.get());
  state_->step([&](StreamHistory& history, AccessChecker& checker) {
    if (point.capture != capture_) {
      checker.add_violation("a wait for an event of another graph capture");
    }
    history.join(stream, point.clock);
    return history.append(stream, Entry::Kind::wait, current_label);
  });
}

bool ScriptedRuntime::follow(Stream stream, c10::Stream users) {
  if (capturing()) return false;
  wait(stream, record(static_cast<Stream>(users.id())));
  return true;
}

void ScriptedRuntime::synchronize(Stream stream) {
  state_->step([&](StreamHistory& history, AccessChecker&) {
    const EntryId entry =
        history.append(stream, Entry::Kind::synchronize, current_label);
    history.join_host(stream);
    return entry;
  });
}

void ScriptedRuntime::touches(Stream stream, const void* begin,
                              std::size_t bytes, Access access) {
  state_->step([&](StreamHistory&, AccessChecker& checker) {
    checker.touched(stream, begin, bytes, access, current_label);
    return 0;
  });
}

void ScriptedRuntime::describe(const void* begin, std::string_view kind,
                               std::string_view name) {
  state_->step([&](StreamHistory&, AccessChecker& checker) {
    checker.describe(begin, base::concat(kind, " of ", name));
    return 0;
  });
}

EntryId ScriptedRuntime::mark(Stream stream, std::string name) {
  return state_->step([&](StreamHistory& history, AccessChecker&) {
    return history.append(stream, Entry::Kind::mark, std::move(name));
  });
}

ScriptedRuntime::Label::Label(std::string name)
    : previous_(std::exchange(current_label, std::move(name))) {}

ScriptedRuntime::Label::~Label() { current_label = std::move(previous_); }

void ScriptedRuntime::adopt(const void* begin, std::size_t bytes,
                            std::string name) {
  state_->step([&](StreamHistory&, AccessChecker& checker) {
    checker.allocated(begin, bytes, std::move(name));
    return 0;
  });
}

void ScriptedRuntime::forget(const void* begin) {
  state_->step([&](StreamHistory&, AccessChecker& checker) {
    return checker.released(begin);
  });
}

std::unique_ptr<AllocationObserver> ScriptedRuntime::watch_torch_allocations() {
  return std::make_unique<AllocationObserver>(
      "scripted runtime",
      [state = state_](void* begin, std::int64_t bytes, c10::Device device) {
        if (device.is_cpu()) state->torch_allocation(begin, bytes);
      });
}

std::vector<Entry> ScriptedRuntime::log() const {
  return state_->query(
      [](const StreamHistory& history) { return history.log(); });
}

std::vector<EntryId> ScriptedRuntime::entries(std::string_view name) const {
  return state_->query([&](const StreamHistory& history) {
    std::vector<EntryId> found;
    for (EntryId id = 0; id < history.log().size(); ++id) {
      if (history.log()[id].name == name) found.push_back(id);
    }
    return found;
  });
}

bool ScriptedRuntime::happens_before(EntryId first, EntryId second) const {
  return state_->query([&](const StreamHistory& history) {
    return history.happens_before(first, second);
  });
}

std::vector<std::string> ScriptedRuntime::violations() const {
  return state_->violations();
}

void ScriptedRuntime::expect_clean() const {
  const std::vector<std::string> all = violations();
  if (!all.empty()) throw violation_error(all);
}

}  // namespace lowtide::device
