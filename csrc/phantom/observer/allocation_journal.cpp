#include <Python.h>

#include "phantom/observer/allocation_journal.h"

#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "phantom/observer/driver.h"

namespace lowtide::dry {
namespace {

using c10::cuda::CUDACachingAllocator::TraceEntry;

// The address of a block that the calling thread asked to free; 0 if that is
// over.
thread_local std::int64_t being_freed = 0;

// Allocations that nobody heard of yet: of any thread, for what was made
// outside of operators is told by whoever comes next.
struct Fresh {
  std::mutex mutex;
  std::vector<std::int64_t> addresses;
} fresh;

std::atomic<AllocationListener> listener = nullptr;

// What runs on the calling thread, innermost last.
thread_local std::vector<const char*> operators;

std::unique_ptr<AllocationJournal>& journal() {
  static std::unique_ptr<AllocationJournal> journal;
  return journal;
}

std::int64_t number(const void* pointer) {
  return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(pointer));
}

// Of graphs the first of a pool's numbers counts, of others the second.
std::int64_t pool_of(const TraceEntry& entry) {
  const auto [of_graph, made] = entry.mempool_;
  return static_cast<std::int64_t>(2 * std::max(of_graph, made) +
                                   (made > 0 ? 1 : 0));
}

std::int64_t handed_out() {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(
      static_cast<c10::DeviceIndex>(journal()->device()));
  return stats.allocated_bytes[0].current;
}

// Under the allocator's lock, which may be taken again.
void enter_in_journal(const TraceEntry& entry) {
  if (entry.device_ != journal()->device()) return;
  const auto address = static_cast<std::int64_t>(entry.addr_);
  const auto bytes = static_cast<std::int64_t>(entry.size_);
  const auto stream = number(entry.stream_);
  switch (entry.action_) {
    case TraceEntry::ALLOC:
      AllocationJournal::completed();
      journal()->allocated(
          {JournalEntry::kAllocate, address, bytes, stream, 0, pool_of(entry)},
          handed_out());
      {
        const std::lock_guard lock(fresh.mutex);
        fresh.addresses.push_back(address);
      }
      return;
    case TraceEntry::FREE_REQUESTED:
      journal()->freed({JournalEntry::kFree, address, bytes, stream},
                       handed_out());
      return;
    case TraceEntry::SEGMENT_ALLOC:
    case TraceEntry::SEGMENT_MAP:
      AllocationJournal::completed();
      journal()->segment({JournalEntry::kSegment, address, bytes, stream},
                         handed_out());
      return;
    case TraceEntry::SEGMENT_FREE:
    case TraceEntry::SEGMENT_UNMAP:
      AllocationJournal::completed();
      journal()->segment({JournalEntry::kSegment, address, -bytes, stream},
                         handed_out());
      return;
    default:
      AllocationJournal::completed();
  }
}

void after_event(void* stream) { journal()->recorded(number(stream)); }

void after_wait(int device, void* stream, int whole_device) {
  if (device != journal()->device()) return;
  journal()->waited({whole_device != 0 ? JournalEntry::kWaitDevice
                                       : JournalEntry::kWaitStream,
                     0, 0, number(stream)});
}

std::unique_ptr<at::ObserverContext> enter_operator(
    const at::RecordFunction& function) {
  operators.push_back(function.name());
  return nullptr;
}

// An exception of Python's may be on its way.
class Interpreter {
 public:
  Interpreter() : state_(PyGILState_Ensure()) {
    PyErr_Fetch(&type_, &value_, &traceback_);
  }
  ~Interpreter() {
    PyErr_Restore(type_, value_, traceback_);
    PyGILState_Release(state_);
  }
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

 private:
  PyGILState_STATE state_;
  PyObject* type_ = nullptr;
  PyObject* value_ = nullptr;
  PyObject* traceback_ = nullptr;
};

void tell_of_fresh() {
  std::vector<std::int64_t> told;
  {
    const std::lock_guard lock(fresh.mutex);
    told.swap(fresh.addresses);
  }
  const auto hear = listener.load();
  if (told.empty() || hear == nullptr) return;
  const Interpreter interpreter;
  const char* name = operators.empty() ? "" : operators.back();
  for (const auto address : told) hear(address, name);
}

void leave_operator(const at::RecordFunction&, at::ObserverContext*) {
  tell_of_fresh();
  if (!operators.empty()) operators.pop_back();
}

}  // namespace

void AllocationJournal::add(JournalEntry entry) { entries_.push_back(entry); }

void AllocationJournal::settle(std::int64_t allocated) {
  if (open_ == kNone) return;
  auto& last = entries_[open_];
  last.block = allocated - total_;
  blocks_[last.address] = last.block;
  total_ = allocated;
  open_ = kNone;
}

void AllocationJournal::allocated(JournalEntry entry, std::int64_t allocated) {
  const std::lock_guard lock(mutex_);
  settle(allocated);
  total_ = allocated;
  open_ = entries_.size();
  add(entry);
}

void AllocationJournal::segment(JournalEntry entry, std::int64_t allocated) {
  const std::lock_guard lock(mutex_);
  settle(allocated);
  add(entry);
}

void AllocationJournal::freed(JournalEntry entry, std::int64_t allocated) {
  being_freed = entry.address;
  const std::lock_guard lock(mutex_);
  if (open_ != kNone && entries_[open_].address == entry.address) {
    open_ = kNone;  // freed at once: its block was never seen
  } else {
    const auto found = blocks_.find(entry.address);
    const auto block = found == blocks_.end() ? 0 : found->second;
    settle(allocated + block);
  }
  blocks_.erase(entry.address);
  total_ = allocated;
  ++num_frees_;
  add(entry);
}

void AllocationJournal::recorded(std::int64_t stream) {
  if (being_freed == 0) return;
  const std::lock_guard lock(mutex_);
  add({JournalEntry::kUsed, being_freed, 0, stream});
}

void AllocationJournal::completed() { being_freed = 0; }

void AllocationJournal::waited(JournalEntry entry) {
  const std::lock_guard lock(mutex_);
  add(entry);
}

void AllocationJournal::end(std::int64_t allocated) {
  const std::lock_guard lock(mutex_);
  settle(allocated);
}

std::int64_t AllocationJournal::num_frees() const {
  const std::lock_guard lock(mutex_);
  return num_frees_;
}

std::vector<JournalEntry> AllocationJournal::entries() const {
  const std::lock_guard lock(mutex_);
  return entries_;
}

}  // namespace lowtide::dry

#define LOWTIDE_DRY_API __attribute__((visibility("default")))

using namespace lowtide::dry;

extern "C" {

// For the rest of the process, before CUDA's first allocation; once.
LOWTIDE_DRY_API void lowtide_dry_start_journal(int device) {
  journal() = std::make_unique<AllocationJournal>(device);
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
      enter_in_journal);
  at::addGlobalCallback(
      at::RecordFunctionCallback(enter_operator, leave_operator)
          .scopes({at::RecordScope::FUNCTION}));
  driver_function<void(void (*)(void*), void (*)(int, void*, int))>(
      "lowtide_dry_listen")(after_event, after_wait);
}
// The entries so far; `entries` stays valid until the next call.
LOWTIDE_DRY_API std::int64_t lowtide_dry_read_journal(
    const JournalEntry** entries) {
  static std::vector<JournalEntry> read;
  journal()->end(handed_out());
  read = journal()->entries();
  *entries = read.data();
  return static_cast<std::int64_t>(read.size());
}
LOWTIDE_DRY_API std::int64_t lowtide_dry_num_frees() {
  return journal()->num_frees();
}
// Null: nobody.
LOWTIDE_DRY_API void lowtide_dry_hear_allocations(AllocationListener hear) {
  listener = hear;
}
// Of allocations outside of operators.
LOWTIDE_DRY_API void lowtide_dry_tell_of_allocations() { tell_of_fresh(); }

}  // extern "C"
