#include "phantom/driver/pinned_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <iterator>

namespace lowtide::dry {
namespace {

// Below, writing zeros costs less than asking the kernel.
constexpr std::size_t kLeastGivenBack = std::size_t{64} << 10;

Address address_of(const void* pointer) {
  return reinterpret_cast<Address>(pointer);
}

}  // namespace

void* PinnedMemory::allocate(std::size_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const std::lock_guard lock(mutex_);
  ranges_[address_of(mapped)] = {.bytes = bytes, .own = true};
  return mapped;
}

bool PinnedMemory::add(const void* pointer, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (around(address_of(pointer)) != ranges_.end()) return false;
  ranges_[address_of(pointer)] = {.bytes = bytes, .own = false};
  return true;
}

std::size_t PinnedMemory::remove(void* pointer) {
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(address_of(pointer));
  if (found == ranges_.end()) return 0;
  const auto range = found->second;
  ranges_.erase(found);
  if (range.own) munmap(pointer, range.bytes);
  return range.bytes;
}

bool PinnedMemory::has(const void* pointer) const {
  const std::lock_guard lock(mutex_);
  return around(address_of(pointer)) != ranges_.end();
}

void PinnedMemory::clear(void* to, std::size_t bytes) {
  const auto page = static_cast<Address>(sysconf(_SC_PAGESIZE));
  const auto begin = address_of(to), end = begin + bytes;
  const auto first = (begin + page - 1) / page * page;
  const auto last = end / page * page;
  const std::lock_guard lock(mutex_);
  const auto range = around(begin);
  const bool own = range != ranges_.end() && range->second.own &&
                   end <= range->first + range->second.bytes;
  if (!own || bytes < kLeastGivenBack) {
    std::memset(to, 0, bytes);
    return;
  }
  std::memset(to, 0, first - begin);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  std::memset(reinterpret_cast<void*>(last), 0, end - last);
}

PinnedMemory::Ranges::const_iterator PinnedMemory::around(
    Address address) const {
  auto found = ranges_.upper_bound(address);
  if (found == ranges_.begin()) return ranges_.end();
  --found;
  const bool inside = address < found->first + found->second.bytes;
  return inside ? found : ranges_.end();
}

PinnedMemory& pinned_memory() {
  static PinnedMemory memory;
  return memory;
}

}  // namespace lowtide::dry
