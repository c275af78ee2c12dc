#include "testing/access_checker.h"

#include <iterator>
#include <utility>

#include "base/check.h"

namespace lowtide::device {
namespace {

std::uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

}  // namespace

AccessChecker::Regions::iterator AccessChecker::region_of(
    std::uintptr_t address) {
  auto region = regions_.upper_bound(address);
  if (region == regions_.begin()) return regions_.end();
  --region;
  return address < region->second.end ? region : regions_.end();
}

void AccessChecker::allocated(const void* begin, std::size_t bytes,
                              std::string name) {
  add_region(begin, bytes, std::move(name), false);
}

void AccessChecker::host_allocated(const void* begin, std::size_t bytes,
                                   std::string name) {
  add_region(begin, bytes, std::move(name), true);
}

void AccessChecker::add_region(const void* begin, std::size_t bytes,
                               std::string name, bool host) {
  const std::uintptr_t from = address_of(begin);
  const std::uintptr_t to = from + bytes;
  auto region = regions_.lower_bound(from);
  if (region != regions_.begin() && std::prev(region)->second.end > from) {
    --region;
  }
  while (region != regions_.end() && region->first < to) {
    region = regions_.erase(region);
  }
  const EntryId entry =
      history_.append(Stream::compute, Entry::Kind::allocate, name);
  regions_.emplace(
      from,
      Region{to, ++num_allocations_, std::move(name), entry, host, 0, {}});
}

void AccessChecker::describe(const void* begin, std::string name) {
  const auto region = regions_.find(address_of(begin));
  if (region != regions_.end()) region->second.name = std::move(name);
}

void AccessChecker::touched(Stream stream, const void* begin, std::size_t bytes,
                            Access access, std::string name) {
  if (bytes == 0) return;
  const EntryId entry = history_.append(
      stream, access == Access::write ? Entry::Kind::write : Entry::Kind::read,
      std::move(name));
  const Use use{address_of(begin), address_of(begin) + bytes, access, entry};
  const auto found = region_of(use.begin);
  if (found == regions_.end()) {
    add_violation(
        base::concat(text(use), " of ", bytes, " bytes that nobody allocated"));
    return;
  }
  Region& region = found->second;
  if (use.end > region.end) {
    add_violation(base::concat(text(use), " of ", bytes, " bytes goes ",
                               use.end - region.end, " bytes past the end of ",
                               text(region)));
    return;
  }
  if (region.release != 0) {
    add_violation(base::concat(text(use), " of ", text(region),
                               " after its release, ", text(region.release)));
    return;
  }
  if (!region.host && !history_.happens_before(region.allocation, entry)) {
    add_violation(base::concat(text(use), " of ", text(region),
                               " does not wait for its allocation, ",
                               text(region.allocation)));
  }
  check_races(region, use);
  remember(region, use);
}

void AccessChecker::check_races(const Region& region, const Use& use) {
  for (const Use& earlier : region.uses) {
    const bool conflict =
        earlier.access == Access::write || use.access == Access::write;
    const bool overlap = earlier.begin < use.end && use.begin < earlier.end;
    if (conflict && overlap &&
        !history_.happens_before(earlier.entry, use.entry)) {
      add_violation(base::concat(text(use), " of ", text(region),
                                 " does not wait for the ", text(earlier)));
    }
  }
}

// Drops uses that the new one stands for: whatever comes after it comes after
// them too, and whatever conflicts with them conflicts with it.
void AccessChecker::remember(Region& region, const Use& use) {
  std::erase_if(region.uses, [&](const Use& earlier) {
    return use.begin <= earlier.begin && earlier.end <= use.end &&
           (use.access == Access::write || earlier.access == Access::read) &&
           history_.happens_before(earlier.entry, use.entry);
  });
  region.uses.push_back(use);
}

std::size_t AccessChecker::released(const void* begin) {
  const auto found = regions_.find(address_of(begin));
  if (found == regions_.end() || found->second.release != 0) return 0;
  Region& region = found->second;
  region.release =
      history_.append(Stream::compute, Entry::Kind::release, region.name);
  for (const Use& use : region.uses) {
    const bool ordered =
        region.host ? history_.happens_before_host(use.entry)
                    : history_.happens_before(use.entry, region.release);
    if (!ordered) {
      add_violation(base::concat(text(region.release), " of ", text(region),
                                 region.host ? ": the host" : ": compute",
                                 " does not wait for the ", text(use)));
    }
  }
  region.uses.clear();
  return region.end - found->first;
}

std::string AccessChecker::text(EntryId id) const {
  const Entry& entry = history_.log()[id];
  std::string label;
  const bool names_the_bytes =
      entry.kind == Entry::Kind::allocate || entry.kind == Entry::Kind::release;
  if (!entry.name.empty() && !names_the_bytes) {
    label = base::concat(" '", entry.name, "'");
  }
  return base::concat(entry_kind_name(entry.kind), label, " on ",
                      stream_name(entry.stream), " (entry ", id, ")");
}

std::string AccessChecker::text(const Use& use) const {
  return text(use.entry);
}

std::string AccessChecker::text(const Region& region) {
  return base::concat("allocation ", region.id, region.name.empty() ? "" : " '",
                      region.name, region.name.empty() ? "" : "'");
}

void AccessChecker::add_violation(std::string text) {
  violations_.push_back(std::move(text));
}

}  // namespace lowtide::device
