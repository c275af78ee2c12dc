// A device on paper: everything runs at once on CPU memory, but every stream
// keeps a vector clock and every declared access is checked against it, so a
// missing event wait is a deterministic test failure instead of a rare race.
//
// Released bytes are filled with 0xFF (NaN in every floating-point format) and
// kept for a while, so that undeclared reads give NaN and undeclared writes are
// found.  Fresh bytes are NaN as well: reading what nobody wrote shows.
//
// Thread-safe.  Host calls count as ordered by real time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "device/allocation_observer.h"
#include "device/cpu_runtime.h"
#include "testing/stream_history.h"

namespace lowtide::device {

class ScriptedRuntime final : public CpuRuntime {
 public:
  struct Options {
    // Throw lowtide::Error at the first broken rule, where it can be thrown
    // (a release can not).  Otherwise rules are collected in violations().
    bool throw_on_violation = false;
    // Released bytes kept poisoned before the oldest go back to the system.
    std::size_t quarantine_bytes = std::size_t{64} << 20;
  };

  ScriptedRuntime() : ScriptedRuntime(Options{}) {}
  explicit ScriptedRuntime(const Options& options);
  ~ScriptedRuntime() override;

  c10::DataPtr allocate(std::size_t bytes) override;
  // Any use is allowed as soon as the call returns; uses are checked against
  // each other, and against the release.
  c10::DataPtr allocate_pinned(std::size_t bytes) override;
  // Declares both accesses and copies at once.
  void copy(Stream stream, void* to, const void* from, std::size_t bytes,
            Copy direction) override;
  Event record(Stream stream) override;
  void wait(Stream stream, const Event& event) override;
  // A stream of the user's is one of the engine's, by its number; a capture
  // records all of them.
  bool follow(Stream stream, c10::Stream users) override;
  void synchronize(Stream stream) override;
  std::uint64_t capture() const override { return capture_; }
  void touches(Stream stream, const void* begin, std::size_t bytes,
               Access access) override;
  void describe(const void* begin, std::string_view kind,
                std::string_view name) override;

  // As if the graph capture of this number began; 0: as if it ended.
  void set_capture(std::uint64_t capture) { capture_ = capture; }

  // Stands for a kernel of the user's on `stream`.
  EntryId mark(Stream stream, std::string name);

  // Names the entries this thread adds while it lives; the innermost counts.
  class Label {
   public:
    explicit Label(std::string name);
    ~Label();
    Label(const Label&) = delete;
    Label& operator=(const Label&) = delete;

   private:
    std::string previous_;
  };

  // Memory that does not come from `allocate`: a touch of unknown bytes breaks
  // a rule.  `adopt` makes [begin, begin + bytes) known as allocated now;
  // `forget` is its release.  While a watch lives, all of torch's own CPU
  // allocations made for this thread are known, gradients included.
  void adopt(const void* begin, std::size_t bytes, std::string name);
  void forget(const void* begin);
  std::unique_ptr<AllocationObserver> watch_torch_allocations();

  std::vector<Entry> log() const;
  // Entries called `name`, oldest first.
  std::vector<EntryId> entries(std::string_view name) const;
  // Whether a chain of in-order streams and event waits leads from `first` to
  // `second`.
  bool happens_before(EntryId first, EntryId second) const;

  std::vector<std::string> violations() const;
  // Throws lowtide::Error listing all violations.
  void expect_clean() const;

 private:
  class State;
  // Shared with what it allocated, which may outlive it.
  std::shared_ptr<State> state_;
  std::uint64_t capture_ = 0;
};

}  // namespace lowtide::device
